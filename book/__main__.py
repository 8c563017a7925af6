"""The book's own tools, as `python -m book --help` lists them. Each command lives beside the code that it runs."""

import typer

from book import notebooks, values
from book.grading.cli import grade, stubs

app = typer.Typer(help="The book's own tools.", no_args_is_help=True, add_completion=False)
app.command()(grade)
app.command()(stubs)
app.command()(values.values)
app.add_typer(notebooks.app, name="notebooks")

if __name__ == "__main__":
    app()
