"""Settings of Sphinx for the documentation site. docs/site/build.py runs Sphinx."""
import html
import os
import pathlib
import re

from docutils import nodes
from pygments import formatters, highlight, lexers
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.domains.cpp import ASTDeclaration, CPPDomain
from sphinx.errors import ExtensionError
from sphinx.util.nodes import make_refnode

ROOT = pathlib.Path(__file__).resolve().parents[2]

project = "voxgrad"
copyright = "the authors of voxgrad"
version = release = re.search(r"project\(voxgrad VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]

extensions = ["myst_parser"]
myst_heading_anchors = 4  # anchors of headings as on GitHub
myst_url_schemes = ["http", "https", "mailto", "source"]  # build.py makes links "source:ops/conv.h"
smartquotes = False  # quotes in comments belong to code
primary_domain = "cpp"
highlight_language = "c++"
# The reference has no entries for names of the standard library, template parameters and hidden names.
nitpick_ignore_regex = [("cpp:identifier", ".*")]

html_theme = "furo"
html_title = f"voxgrad {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_search_scorer = str(ROOT / "docs/site/scorer.js")
html_copy_source = False
html_use_index = False  # the page "Reference" lists all names
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "native"

# Words that are not linked, because in code font they rarely mean the function with this name.
NOT_LINKED = {"name", "has", "check", "fail", "convert", "concat", "runtime", "record", "version", "place", "active"}

TARGETS = {}  # name of a declaration: (page, anchor)


class SearchableDomain(CPPDomain):
    """The C++ domain without the entries of parameters, so that the search of the site finds functions first."""

    def get_objects(self):
        return (entry for entry in super().get_objects() if entry[2] not in ("functionParam", "templateParam"))


def cached_id(declaration, compute=ASTDeclaration.get_newest_id):
    """Returns the id of a declaration. Old versions of Sphinx have no cache and spend a third of their time on ids."""
    if not hasattr(declaration, "cached_id"):
        declaration.cached_id = compute(declaration)
    return declaration.cached_id


ASTDeclaration.get_newest_id = cached_id


def depth(node):
    """Returns the number of declarations around a declaration."""
    return 0 if node.parent is None else depth(node.parent) + isinstance(node.parent, addnodes.desc)


def list_declarations(app, doctree):
    """Adds the declarations outside of classes to the table of contents of their page, each name once.

    Also removes the links of the word "std", which would lead to the function voxgrad::std.
    """
    seen = set()
    for reference in list(doctree.findall(addnodes.pending_xref)):
        if reference.get("refdomain") == "cpp" and reference["reftarget"] == "std":  # not the function voxgrad::std
            reference.replace_self(reference.children)
    for signature in doctree.findall(addnodes.desc_signature):
        names = [node.astext() for node in signature.findall(addnodes.desc_name)]
        name = names[-1] if names else ""
        if depth(signature.parent) == 0 and name not in seen and not name.startswith("operator"):
            seen.add(name)
            signature["_toc_name"], signature["_toc_parts"] = name, (name,)


def collect_names(app, env):
    """Stores the page and the anchor of each declaration. Overloads share the anchor of the first overload.

    Raises ExtensionError if a name of docs/ops.md has no entry.
    """
    found = set()
    for name, _, kind, page, anchor, _ in env.get_domain("cpp").get_objects():
        TARGETS.setdefault(name, (page, anchor))
        if kind != "enumerator":
            found.add(name.rsplit("::", 1)[-1])
    # A test checks that the headers declare all names of docs/ops.md. A name without an entry is a fault of
    # reference.py.
    entries = re.findall(r"^- ((?:`[^`]*`,? ?)+)", (ROOT / "docs/ops.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = [name for entry in entries for name in re.findall(r"`(?:\w+::)*(\w+)`", entry)]
    if missing := [name for name in names if name not in found and name != "VG_MODULE"]:
        raise ExtensionError(f"the reference has no entry for {', '.join(missing)}, which docs/ops.md lists")


def link_names(app, doctree, docname):
    """Links the names of declarations in code font to the reference, except on the page of the Python package.

    On the pages of the reference, also links names of headers and pages, and names such as "conv3d()" and
    "voxgrad::conv3d" in plain text.
    """

    headers = app.env.get_domain("std").anonlabels

    def link(text):
        if (page := text.removesuffix(".md")) != text and page in app.env.titles:
            return make_refnode(app.builder, docname, page, "", nodes.Text(app.env.titles[page].astext()))
        name = re.sub(r"^(vg|voxgrad)::|\(\)$", "", text)
        page, anchor = headers.get(text) if text.endswith(".h") and text in headers else TARGETS.get(
            "voxgrad::" + name, (None, None))
        if page is None or name in NOT_LINKED:
            return None
        return make_refnode(app.builder, docname, page, anchor, nodes.Text(text))

    def is_linkable(node):
        while node := node.parent:
            if isinstance(node, (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.comment,
                                 addnodes.desc_signature, addnodes.toctree)):
                return False
        return True

    for node in list(doctree.findall(nodes.literal)) if docname != "docs/pytorch" else ():
        if re.fullmatch(r"[\w:]+(\(\))?", node.astext()) and is_linkable(node) and (reference := link(node.astext())):
            node.children = []
            node += reference
    if docname.startswith("reference/"):
        for node in list(doctree.findall(nodes.Text)):
            parts = re.split(r"(\b(?:core|ops|nn|cuda)/[\w/]+\.h\b|\bdocs/[\w-]+\.md\b|(?:\w+::)+\w+(?:\(\))?|\w+\(\))",
                             node.astext())
            if len(parts) > 1 and is_linkable(node):
                node.parent.replace(node, [link(part) or nodes.Text(part) for part in parts if part])
    for node in doctree.findall(nodes.reference):
        if node.get("refuri", "").startswith("source:"):
            node["refuri"] = app.builder.get_relative_uri(docname, node["refuri"].replace(":", "/", 1))


SOURCE_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} - voxgrad</title>
{styles}
</head><body class="source">
<script>document.body.dataset.theme = localStorage.getItem("theme") || "auto";</script>
<p><a href="{root}/index.html">voxgrad</a> / {name}</p>{content}</body></html>
"""


def write_sources(app, exception):
    """Writes the pages that show source files and folders."""
    if exception:
        return
    formatter = formatters.HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)
    for name in (pathlib.Path(app.srcdir) / "sources.txt").read_text().splitlines():
        path = ROOT / name
        if path.is_dir():
            names = sorted(file.name for file in path.iterdir() if file.is_file())
            content = "".join(f'<p><a href="{path.name}/{file}.html">{file}</a></p>' for file in names)
        else:
            try:
                lexer = lexers.CppLexer() if path.suffix in (".def", ".in") else lexers.get_lexer_for_filename(path)
            except ClassNotFound:
                lexer = lexers.TextLexer()
            content = highlight(path.read_text(encoding="utf-8", errors="replace"), lexer, formatter)
        page = pathlib.Path(app.outdir) / f"source/{name}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        root = os.path.relpath(app.outdir, page.parent)
        styles = "\n".join(f'<link rel="stylesheet" href="{root}/_static/{file}">'
                           for file in ("pygments.css", "styles/furo.css", "site.css"))
        page.write_text(SOURCE_PAGE.format(name=html.escape(name), styles=styles, root=root, content=content),
                        encoding="utf-8")


def repair_theme(app, exception):
    """Repairs Debian's packages of Furo, which contain unfinished files: without this, the site has no dark mode.

    The script of the theme is a module, which browsers do not load from a disk. The style sheet ignores the color
    scheme of the system and, in Debian 12, imports a file by an absolute path.
    """
    if exception:
        return
    static = pathlib.Path(app.outdir) / "_static"
    script = (static / "scripts/furo.js").read_text(encoding="utf-8")
    if script.startswith("import "):
        script = script.split("\n", 1)[1]
        gumshoe = (static / "scripts/gumshoe-patched.js").read_text(encoding="utf-8")
        (static / "scripts/furo.js").write_text(gumshoe + script, encoding="utf-8")
        for page in pathlib.Path(app.outdir).rglob("*.html"):
            text = page.read_text(encoding="utf-8")
            page.write_text(text.replace('<script type="module" src=', "<script src="), encoding="utf-8")
    style = (static / "styles/furo.css").read_text(encoding="utf-8")
    style = re.sub(r"^@import url\((/javascript/[^)]*)\);",
                   lambda match: pathlib.Path(f"/usr/share{match[1]}").read_text(encoding="utf-8"), style)
    if not re.search(r"prefers-color-scheme: ?dark\)\s*{\s*body:not", style):
        dark = re.search(r'body\[data-theme="dark"\] ({[^{}]*)', style)[1]
        style += f'@media screen and (prefers-color-scheme: dark) {{ body:not([data-theme="light"]) {dark} }} }}\n'
    (static / "styles/furo.css").write_text(style, encoding="utf-8")


def setup(app):
    app.add_domain(SearchableDomain, override=True)
    app.connect("doctree-read", list_declarations, priority=400)  # before Sphinx collects the table of contents
    app.connect("env-updated", collect_names)
    app.connect("doctree-resolved", link_names)
    app.connect("build-finished", write_sources)
    app.connect("build-finished", repair_theme)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
