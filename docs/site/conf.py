"""Settings of Sphinx for the documentation site. docs/site/build.py runs Sphinx."""
import pathlib
import re

from docutils import nodes
from sphinx import addnodes
from sphinx.domains.cpp import CPPDomain
from sphinx.util.nodes import make_refnode

ROOT = pathlib.Path(__file__).resolve().parents[2]

project = "voxgrad"
copyright = "the authors of voxgrad"
version = release = re.search(r"project\(voxgrad VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]

extensions = ["myst_parser"]
myst_heading_anchors = 4  # anchors of headings as on GitHub
smartquotes = False  # quotes in comments belong to code
primary_domain = "cpp"
highlight_language = "c++"
# The reference has no entries for the standard library, template parameters and hidden names.
nitpick_ignore_regex = [("cpp:identifier", ".*")]

html_theme = "furo"
html_title = f"voxgrad {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "native"

# Words in code font that are more often something else than the function of this name.
NOT_LINKED = {"name", "has", "check", "fail", "convert", "concat", "runtime", "record", "version", "place", "active"}

TARGETS = {}  # name of a declaration: (page, anchor)


class SearchableDomain(CPPDomain):
    """The C++ domain without parameters, which would bury functions in the results of the search."""

    def get_objects(self):
        return (entry for entry in super().get_objects() if entry[2] not in ("functionParam", "templateParam"))


def depth(node):
    """Returns the number of declarations around a declaration."""
    return 0 if node.parent is None else depth(node.parent) + isinstance(node.parent, addnodes.desc)


def list_declarations(app, doctree):
    """Adds the declarations outside of classes to the table of contents of their page, each name once."""
    seen = set()
    for signature in doctree.findall(addnodes.desc_signature):
        names = [node.astext() for node in signature.findall(addnodes.desc_name)]
        name = names[-1] if names else ""
        if depth(signature.parent) == 0 and name not in seen and not name.startswith("operator"):
            seen.add(name)
            signature["_toc_name"], signature["_toc_parts"] = name, (name,)


def collect_names(app, env):
    """Stores the page and the anchor of each declaration; overloads share those of the first."""
    for name, _, _, page, anchor, _ in env.get_domain("cpp").get_objects():
        TARGETS.setdefault(name, (page, anchor))


def link_names(app, doctree, docname):
    """Links the names of declarations in code font to the reference. Also links names such as "conv3d()" and
    "voxgrad::conv3d" in the comments of the reference."""

    def link(text):
        name = re.sub(r"^(vg|voxgrad)::|\(\)$", "", text)
        page, anchor = TARGETS.get("voxgrad::" + name, (None, None))
        if page is None or name in NOT_LINKED:
            return None
        return make_refnode(app.builder, docname, page, anchor, nodes.Text(text))

    def is_linkable(node):
        while node := node.parent:
            if isinstance(node, (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, addnodes.desc_signature,
                                 addnodes.toctree, nodes.comment)):
                return False
        return True

    for node in list(doctree.findall(nodes.literal)):
        if re.fullmatch(r"[\w:]+(\(\))?", node.astext()) and is_linkable(node) and (reference := link(node.astext())):
            node.children = []
            node += reference
    if docname.startswith("reference/"):
        for node in list(doctree.findall(nodes.Text)):
            parts = re.split(r"((?:\w+::)+\w+(?:\(\))?|\w+\(\))", node.astext())
            if len(parts) > 1 and is_linkable(node):
                node.parent.replace(node, [link(part) or nodes.Text(part) for part in parts if part])


def setup(app):
    app.add_domain(SearchableDomain, override=True)
    app.connect("doctree-read", list_declarations, priority=400)  # before Sphinx collects the table of contents
    app.connect("env-updated", collect_names)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
