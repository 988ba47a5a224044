"""kakera eval: measure what a model, a quantisation or a KV codec gets right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kakera.cli.options import JsonOption, ModelArgument, with_memory_options
from kakera.cli.progress import progress
from kakera.plan.plan import Wishes

app = typer.Typer(help="Measure quality: ppl, kld, retrieval, tools, json, vision; and drafts.", no_args_is_help=True)

DataOption = Annotated[Path | None, typer.Option("--data", help="Data to use instead of the shipped one.")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="At most that many cases or windows.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Draws the sample that --limit keeps.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Write one JSON line an answer to this file.")]
BaselineOption = Annotated[Path | None, typer.Option("--baseline", help="Answers (jsonl) to compare with.")]
LongestOption = Annotated[
    int | None, typer.Option("--max-prompt-tokens", min=1, help="Leave out cases with longer prompts.")
]
BiasOption = Annotated[bool, typer.Option("--escha-bias", help="Add the biases that Escha files carry.")]
WindowOption = Annotated[int, typer.Option("--window", min=2, help="Tokens of a window; each starts cold.")]


@app.command()
@with_memory_options
def ppl(
    model: ModelArgument = "mini",
    data: DataOption = None,
    limit: LimitOption = None,
    seed: SeedOption = 0,
    window: WindowOption = 2048,
    escha_bias: BiasOption = False,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Perplexity of held-out text under the chosen KV codec."""
    from kakera.evaluate.ppl import perplexity
    from kakera.evaluate.session import open_forced
    from kakera.evaluate.windows import cut_held_out
    from kakera.text.tokenizer import Tokenizer

    directory = _directory(model)
    windows = cut_held_out(Tokenizer.load(directory), window, limit, data, seed)
    forced = open_forced(directory, wishes, window, escha_bias=escha_bias)
    with progress("tokens", window * len(windows)) as advance:
        found = perplexity(forced, windows, advance)
    result = {"suite": "ppl", "model": model, "kv": wishes.kv, "escha_bias": escha_bias, "window": window}
    _show(
        {**result, "perplexity": found.perplexity, **asdict(found)},
        as_json,
        f"perplexity {found.perplexity:.3f}   nll {found.nll.text()} nats a token (5–95 %)   "
        f"{found.positions:,} positions in {found.windows} windows of {window}, KV {wishes.kv}",
    )


@app.command()
@with_memory_options
def kld(
    model: ModelArgument = "mini",
    base: Annotated[str | None, typer.Option("--base", help="Baseline model (default: the tested one).")] = None,
    base_kv: Annotated[str, typer.Option("--base-kv", help="KV codec of the baseline.")] = "bf16",
    data: DataOption = None,
    limit: LimitOption = None,
    seed: SeedOption = 0,
    window: WindowOption = 2048,
    escha_bias: BiasOption = False,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Divergence of a codec or a quantised model from a baseline, position by position."""
    from kakera.evaluate.kld import divergence
    from kakera.evaluate.session import open_forced
    from kakera.evaluate.windows import cut_held_out
    from kakera.text.tokenizer import Tokenizer

    directory = _directory(model)
    windows = cut_held_out(Tokenizer.load(directory), window, limit, data, seed)
    tested = open_forced(directory, wishes, window, escha_bias=escha_bias)
    plain = replace(wishes, kv=base_kv, rotation=None)
    if base is None:
        reference = open_forced(directory, plain, window, tested.model)
    else:
        reference = open_forced(_directory(base), plain, window)
    with progress("tokens", window * len(windows)) as advance:
        found = divergence(reference, tested, windows, advance)
    result = {"suite": "kld", "model": model, "kv": wishes.kv, "escha_bias": escha_bias, "base": base or model}
    _show(
        {**result, "base_kv": base_kv, "window": window, **asdict(found)},
        as_json,
        f"KLD {found.kld.text('.5f')} nats (mean, 5–95 %)   "
        f"median {found.median:.5f}   p99 {found.p99:.4f}   max {found.max:.3f}\n"
        f"same top-1 token {found.top1.text('.2%')}   nll {found.nll_delta.mean:+.5f} nats a token\n"
        f"{found.positions:,} positions in {found.windows} windows of {window}: "
        f"{model} KV {wishes.kv} against {base or model} KV {base_kv}",
    )


@app.command()
@with_memory_options
def drafts(
    model: ModelArgument = "mini",
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most that many texts of each kind.")] = 4,
    seed: SeedOption = 0,
    depth: Annotated[int, typer.Option("--depth", min=1, max=7, help="Guesses of the draft layer at a time.")] = 3,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """How often guesses of what comes next are right: of the draft layer by depth, and of look-ups. On a CPU."""
    from kakera.cli.engine import with_drafts
    from kakera.errors import UsageError
    from kakera.evaluate.drafts import TEMPERATURES, acceptance, prompts, table
    from kakera.evaluate.session import open_engine, open_reader
    from kakera.plan.planner import plan_for
    from kakera.target.devices import resolve_to_compute

    directory, machine = _directory(model), resolve_to_compute(wishes.gpus)
    if machine.target.has_cards:
        raise UsageError("guesses are checked on a CPU only so far: add --gpus cpu")
    wishes = with_drafts(wishes, depth, machine)
    reader = open_reader(directory)
    texts = prompts(reader, limit, seed)
    layer = plan_for(directory, wishes).spec.drafting
    engine = open_engine(directory, wishes)
    with progress("texts", sum(map(len, texts.values())) * len(TEMPERATURES) * (2 if layer else 1)) as advance:
        found = acceptance(engine, texts, depth, layer, reader.stop_tokens, partial(advance, 1))
    result = {"suite": "drafts", "model": model, "kv": wishes.kv, "depth": depth, "draft_layer": layer}
    title = f"drafts: {model}, KV {wishes.kv}" + ("" if layer else "; its files hold no draft layer")
    _show({**result, "rows": [tally.json for tally in found]}, as_json, table(title, found, depth))


def _suite_command(suite: str) -> Callable[..., None]:
    """The command of one suite of prompts; all suites take the same options."""

    def command(
        model: ModelArgument = "mini",
        data: DataOption = None,
        limit: LimitOption = None,
        seed: SeedOption = 0,
        max_prompt_tokens: LongestOption = None,
        escha_bias: BiasOption = False,
        out: OutOption = None,
        baseline: BaselineOption = None,
        as_json: JsonOption = False,
        *,
        wishes: Wishes,
    ) -> None:
        _run_suite(suite, model, (data, limit, seed, max_prompt_tokens), escha_bias, out, baseline, as_json, wishes)

    return with_memory_options(command)


app.command("retrieval", help="Facts to find in long texts and tables.")(_suite_command("retrieval"))
app.command("tools", help="Function calls: the right ones with the right arguments, or none.")(_suite_command("tools"))
app.command("json", help="JSON objects to extract from a text, unconstrained.")(_suite_command("json"))
app.command("vision", help="Questions about images, of a suite that --data names.")(_suite_command("vision"))


def _run_suite(
    suite: str,
    model: str,
    choice: tuple[Path | None, int | None, int, int | None],
    escha_bias: bool,
    out: Path | None,
    baseline: Path | None,
    as_json: bool,
    wishes: Wishes,
) -> None:
    from kakera.errors import UsageError
    from kakera.evaluate.data import load_baseline, load_cases
    from kakera.evaluate.session import open_engine, open_reader, open_seeing_reader
    from kakera.evaluate.suites import run_suite
    from kakera.evaluate.tables import groups, table

    if out and not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no directory {out.parent}")
    cases = load_cases(suite, *choice)
    known = load_baseline(baseline) if baseline else None
    directory = _directory(model)
    reader = open_seeing_reader(directory, wishes) if suite == "vision" else open_reader(directory)
    engine = open_engine(directory, wishes, escha_bias=escha_bias)
    with progress(suite, len(cases)) as advance:
        answers = run_suite(suite, cases, engine, reader, partial(advance, 1))
    if out:
        _write_lines(out, [asdict(answer) for answer in answers])
    rows = groups(answers, known)
    result = {"suite": suite, "model": model, "kv": wishes.kv, "escha_bias": escha_bias}
    _show({**result, "groups": [row.json() for row in rows]}, as_json, table(f"{suite}: {model}, KV {wishes.kv}", rows))
    for answer in answers:
        if answer.error:
            typer.echo(f"{answer.id}: {answer.error}", err=True)


def _directory(model: str) -> Path:
    from kakera.cli.model import resolve_model
    from kakera.errors import UsageError

    found = resolve_model(model)
    if found.scripted:
        raise UsageError("a scripted model only plays back its script: there is nothing to evaluate")
    return found.path


def _show(result: dict[str, Any], as_json: bool, view: Any) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(result, indent=2))
        return
    from rich.console import Console

    Console(highlight=False).print(view)


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    import json

    from kakera.errors import UsageError

    try:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}") from None
