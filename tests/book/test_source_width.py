"""Source code that is fitted to the page is the same code, with the same words in its comments and docstrings."""

import ast
import inspect
import io
import re
import tokenize

from book import source_width

PRAGMA = re.compile(r"(fmt|type|noqa)\b")


def code_of(source: str) -> str:
    """The syntax tree, with docstrings that differ in line breaks made equal."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = " ".join(node.value.value.split())
        if isinstance(node, ast.Delete) and isinstance(node.targets[0], ast.Tuple):
            node.targets = node.targets[0].elts  # `del (a, b)` is `del a, b`
    return ast.dump(tree)


def comments_of(source: str) -> list[str]:
    """The words of all comments, in order of the alphabet: a comment may move to the line before its code."""
    comments = [
        t.string.lstrip("# ")
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    ]
    return sorted(
        word for comment in comments if not PRAGMA.match(comment) for word in comment.split() if word.strip("-")
    )


def test_it_is_the_same_code_in_fewer_columns() -> None:
    source = inspect.getsource(source_width)
    shown = source_width.fit(source)
    assert shown != source
    assert code_of(shown) == code_of(source)
    assert comments_of(shown) == comments_of(source)
    wide = [line for line in shown.splitlines() if len(line) > source_width.COLUMNS]
    assert all('"' in line and '"""' not in line for line in wide)  # strings are not divided, docstrings are


def test_prose_is_filled_and_comments_come_first() -> None:
    source = '''    def f(self, a: int, b: int) -> int:
        """Return a number.

        A long explanation that goes on and on.
        It ends here.

        Args:
            a: the first number, which may be any.
            b: the second.
        """
        # Where the numbers come from is none of our business.
        return self.total + a + b  # the sum

    '''
    assert source_width.fit(source, 120) == source
    assert source_width.fit(source, 40).splitlines() == [
        "    def f(self, a: int, b: int) -> int:",
        '        """Return a number.',
        "",
        "        A long explanation that goes on",
        "        and on. It ends here.",
        "",
        "        Args:",
        "            a: the first number, which",
        "                may be any.",
        "            b: the second.",
        '        """',
        "        # Where the numbers come from is",
        "        # none of our business.",
        "        # the sum",
        "        return self.total + a + b",
    ]
