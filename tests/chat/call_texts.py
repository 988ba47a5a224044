"""What tests of calls are made of: declared tools, calls as text, and what the parser makes of a text."""

from kakera.chat.tools import ToolCallParser


def tool(name: str, properties: dict | None = None, **more) -> dict:
    schema = {"type": "object", "properties": properties or {}, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call_text(name: str, **parameters: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def events(pieces, tools, truncated=False, finish=True) -> list[str | list[str]]:
    """Text, and calls as [name, arguments], in the order in which they came."""
    parser = ToolCallParser(tools)
    outputs = [output for piece in pieces for output in parser.feed(piece)]
    found: list = []
    calls = 0
    for output in outputs + (parser.finish(truncated) if finish else []):
        if isinstance(output, str):
            assert output
            if not found or not isinstance(found[-1], str):
                found.append("")
            found[-1] += output
        elif output.id is not None:
            assert output.index == calls and output.id.startswith("call_")
            calls += 1
            found.append([output.name, output.arguments])
        else:
            assert output.name is None and output.index == calls - 1 and isinstance(found[-1], list)
            found[-1][1] += output.arguments
    return found


def parse(pieces, tools, truncated=False, finish=True) -> tuple[str, list[tuple[str, str]]]:
    """All text, and all calls as (name, arguments)."""
    found = events(pieces, tools, truncated, finish)
    return "".join(e for e in found if isinstance(e, str)), [tuple(e) for e in found if isinstance(e, list)]
