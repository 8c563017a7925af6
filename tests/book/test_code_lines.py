"""The count of lines of code leaves out what is not code."""

from book import code_lines
from book.paths import repository_root

SOURCE = '''"""A docstring
of two lines."""

# a comment
x = 1  # code

def f() -> str:
    """Another."""
    return (
        "a string"
    )
'''


def test_blank_lines_comments_and_docstrings_do_not_count():
    assert code_lines.count(SOURCE) == 5


def test_the_table_adds_up():
    engine = repository_root() / "mini_engine"
    total = sum(code_lines.count(file.read_text(encoding="utf-8")) for file in engine.rglob("*.py"))
    assert f"{total:,}" in code_lines.markdown().splitlines()[-1]
