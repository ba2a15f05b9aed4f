"""The documentation site: Markdown extensions of mkdocs.yml, and the pages of docs/reference, which are generated.

api           Python API, from signatures and docstrings
catalogue     presets with their sizes, recipes with their data
commands      command line, from the commands themselves
excerpts      excerpts of source files on pages
fields        configs, recipes, decoding options and grids, from their schemas
lab_page      page of a claim in docs/lab
lab_report    pages of docs/lab, from results of claims
mathml        Markdown extension: formulae
source_links  Markdown extension: links to source files, and the pages of these files
text          Markdown made of plain text: escapes and tables

`python -m docs_site` writes docs/reference and the excerpts,
`python -m docs_site.lab_report` docs/lab.
"""
