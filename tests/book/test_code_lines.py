"""The count of lines of code leaves out what is not code."""

from book import code_lines

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
