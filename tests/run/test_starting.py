"""What a start says, and when."""

from __future__ import annotations

from kakera.run.build import LOADING, over_plan
from kakera.run.process.starting import lines


def test_a_log_gets_a_line_for_each_slow_stage():
    now, said = [0.0], []
    tell = lines(said.append, lambda: now[0])
    for done, at in ((1, 0.1), (2, 0.2)):
        now[0] = at
        tell("quick", done, 2)
    for done in range(1, 5):
        now[0] += 1
        tell("slow", done, 4)
    assert said == ["slow: 4 in 4.0 s"]


def test_loading_tells_every_layer(tiny_model):
    from run_world import tiny_plan

    from kakera.run.build import build_engine

    told = []
    build_engine(tiny_model, tiny_plan(tiny_model), progress=lambda *args: told.append(args))
    layers = told[0][2]
    assert told == [(LOADING, i + 1, layers) for i in range(layers)]


def test_more_taken_than_planned_is_said_in_words(tiny_model):
    from run_world import tiny_plan

    plan = tiny_plan(tiny_model)
    planned = plan.total("device")
    assert over_plan(plan, int(planned * 1.02)) == []
    (line,) = over_plan(plan, int(planned * 1.2))
    assert f"{planned / 1e9:.2f} GB were planned" in line and "lower --context" in line
