"""Write the generated pages of docs/reference: `python -m docs_site`."""

from pathlib import Path

from docs_site import api, catalogue, commands, fields

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"


def generate() -> dict[str, str]:
    """Return all generated pages by file name."""
    return api.pages() | commands.pages() | fields.pages() | catalogue.pages()


def main() -> None:
    """Write pages that changed."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in generate().items():
        page = FOLDER / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(f"docs/reference/{name}")


if __name__ == "__main__":
    main()
