"""The page's Markdown, by Node: the tree of nodes that a text becomes. Skipped where there is no Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from typing import Any

import pytest

from kakera.server.operate.page import DIRECTORY

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node on the PATH")
SECONDS = 3.0  # for 100,000 characters of the worst kind: the slowest takes 0.7 s on a laptop's core


def node(script: str, given: Any) -> Any:
    module = json.dumps((DIRECTORY / "markdown.js").as_uri())
    program = (
        f"import {{ parse, inline, address }} from {module};"
        "let given = ''; for await (const part of process.stdin) given += part; given = JSON.parse(given);"
        "const depth = (node) => Object.values(node && typeof node === 'object' ? node : {})"
        ".reduce((most, each) => Math.max(most, 1 + depth(each)), 0);"
        f"console.log(JSON.stringify({script}));"
    )
    command = [str(NODE), "--input-type=module", "-e", program]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def short(found: Any) -> Any:
    """(type, everything else in order), text as it is."""
    if isinstance(found, list):
        return [short(each) for each in found]
    if isinstance(found, dict):
        return (found["type"], *(short(value) for name, value in found.items() if name != "type"))
    return found


INLINE = {
    "plain": ["plain"],
    "**a** *b* __c__ _d_ ~~e~~": [
        ("strong", ["a"]), " ", ("em", ["b"]), " ", ("strong", ["c"]), " ", ("em", ["d"]), " ", ("del", ["e"]),
    ],
    "**a *b* c**": [("strong", ["a ", ("em", ["b"]), " c"])],
    "***a***": [("strong", [("em", ["a"])])],
    "**重要**です": [("strong", ["重要"]), "です"],
    "snake_case_name 2 * 3 * 4 ** 5": ["snake_case_name 2 * 3 * 4 ** 5"],
    "**not closed *here": ["**not closed *here"],
    "*a **b* c**": [("em", ["a **b"]), " c**"],
    "`a*b*` ``c`d`` `e": [("code", "a*b*"), " ", ("code", "c`d"), " `e"],
    "\\*a\\* \\q": ["*a* \\q"],
    "a\nb": ["a", ("break",), "b"],
    "[a **b**](https://x.org/y_(z)?q=1 \"t\").": [
        ("link", "https://x.org/y_(z)?q=1", ["a ", ("strong", ["b"])]), ".",
    ],
    "see https://x.org/a_b. (https://y.org)": [
        "see ", ("link", "https://x.org/a_b", ["https://x.org/a_b"]),
        ". (", ("link", "https://y.org/", ["https://y.org"]), ")",
    ],
    "![a cat](https://x.org/cat.png)": [("link", "https://x.org/cat.png", ["a cat"])],
    "[a](/b) [c] [d](e f) ](": ["[a](/b) [c] [d](e f) ]("],
    "<b>x</b> &lt; <!-- y -->": ["<b>x</b> &lt; <!-- y -->"],
}  # fmt: skip


def test_inline():
    found = node("given.map(inline)", list(INLINE))
    assert [short(each) for each in found] == list(INLINE.values())


BLOCKS = {
    "# a #\n## b\n####### c": [("heading", 1, ["a"]), ("heading", 2, ["b"]), ("paragraph", ["####### c"])],
    "a\nb\n\nc": [("paragraph", ["a", ("break",), "b"]), ("paragraph", ["c"])],
    "a\n```py x\n  b\n\n```\nc": [("paragraph", ["a"]), ("code", "py", "  b\n"), ("paragraph", ["c"])],
    "~~~~\n```\n~~~\nstill open": [("code", "", "```\n~~~\nstill open")],
    "- a\n  - b\n- c": [
        ("list", False, None, [
            [("paragraph", ["a"]), ("list", False, None, [[("paragraph", ["b"])]])],
            [("paragraph", ["c"])],
        ]),
    ],
    "3. a\n   ```\n   x\n   ```\n\n4. b\n\nc": [
        ("list", True, 3, [[("paragraph", ["a"]), ("code", "", "x")], [("paragraph", ["b"])]]), ("paragraph", ["c"]),
    ],
    "> a\n> > b\nc": [("quote", [("paragraph", ["a"]), ("quote", [("paragraph", ["b"])])]), ("paragraph", ["c"])],
    "| a | b |\n|:-:|--:|\n| 1 | x\\|y | z |\n| 2 |\n\n---": [
        ("table", ["center", "right"], [["a"], ["b"]], [[["1"], ["x|y"]], [["2"], []]]), ("rule",),
    ],
    "a | b\nc | d": [("paragraph", ["a | b", ("break",), "c | d"])],
}  # fmt: skip


def test_blocks():
    found = node("given.map(parse)", list(BLOCKS))
    assert [short(each) for each in found] == list(BLOCKS.values())


def test_a_text_that_grows_keeps_the_blocks_before_its_last_two():
    """What the page relies on when it draws only what has changed."""
    text = "# a\n\nb **c** d\n\n- e\n- f\n\n```\ng\n\nh\n```\n\n| i | j |\n|---|---|\n| k | l |\n\nend"
    trees = node("[...given].map((_, i) => parse(given.slice(0, i + 1)))", text)
    for before, after in pairwise(trees):
        kept = max(0, len(before) - 2)
        assert after[:kept] == before[:kept]


def test_only_the_web_is_linked():
    good = ["https://x.org", "http://127.0.0.1:30000/a?b#c", "HTTPS://X.ORG/%22"]
    bad = [
        "javascript:alert(1)", "JaVaScRiPt:alert(1)", " javascript:x", "java\nscript:x", "data:text/html,x",
        "vbscript:x", "file:///etc/passwd", "//x.org", "/v1/models", "?a", "#b", "blob:https://x.org/y", "mailto:a@b.c",
        "https:x.org", "https://", "https://[", "https://x.org/" + "y" * 3000, "",
    ]  # fmt: skip
    found = node("given.map(address)", good + bad)
    assert all(href.startswith(("https://", "http://")) for href in found[: len(good)])
    assert found[len(good) :] == [None] * len(bad)


def test_no_text_takes_long_or_lies_deep():
    count = 100_000
    pieces = [
        "*", "_", "~", "`", "[", "]", "(", "![", "[](", "[a](", "](", "<", "<http://", "http://", "h", "\\", "!", ">",
        "> ", "- ", "1. ", "#", "# ", "|", "|a", "|-", "a|b\n", "|\n", "-", ":-", "```\n", "~~~\n", "\n", " ", "\t",
        "*a ", "**a *b ", "a* ", "_a_", "a\n", "- a\n", "> a\n", "[a](http://b) ", "`a", "\r", "\0", "\u2028",
        "é", "\ud83d\ude00",
    ]  # fmt: skip
    texts = [(piece * count)[:count] for piece in pieces]
    texts += ["[" * 5 + "]" * count, "*a" * 5 + "b*" * (count // 2), "".join("`" * i + "a" for i in range(600))]
    texts += ["\n".join("  " * i + "- a" for i in range(600)), "".join(">" * i + " a\n" for i in range(600))]
    script = """given.map((text) => {
        const began = performance.now();
        const tree = parse(text);
        return [performance.now() - began, depth(tree)];
    })"""
    for text, (milliseconds, most) in zip(texts, node(script, texts), strict=True):
        assert milliseconds < 1000 * SECONDS, (text[:20], milliseconds)
        assert most < 100, (text[:20], most)
