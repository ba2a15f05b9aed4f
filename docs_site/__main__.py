"""Write the pages of docs/reference, and the excerpts of source files on other pages: `python -m docs_site`."""

from pathlib import Path

from docs_site import api, catalogue, commands, fields
from docs_site.excerpts import with_excerpts

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = DOCS / "reference"


def generate() -> dict[str, str]:
    """Return all generated pages by file name."""
    return api.pages() | commands.pages() | fields.pages() | catalogue.pages()


def main() -> None:
    """Write pages that changed."""
    FOLDER.mkdir(exist_ok=True)
    pages = {FOLDER / name: text for name, text in generate().items()}
    pages |= {page: with_excerpts(page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md") if page not in pages}
    for page, text in pages.items():
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(page.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
