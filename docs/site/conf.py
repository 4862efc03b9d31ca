"""Settings of Sphinx for the documentation site. docs/site/build.py runs Sphinx."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]

project = "voxgrad"
copyright = "the authors of voxgrad"
version = re.search(r"VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text().split("project(", 1)[1])[1].rstrip(")")
release = version

extensions = ["myst_parser"]
myst_heading_anchors = 4  # anchors of headings, as on GitHub
myst_enable_extensions = ["attrs_image"] if False else []
suppress_warnings = ["myst.header"]
highlight_language = "c++"
pygments_style = "friendly"
pygments_dark_style = "native"

primary_domain = "cpp"
add_function_parentheses = False
toc_object_entries_show_parents = "hide"
cpp_maximum_signature_line_length = 100
nitpick_ignore_regex = [("cpp:identifier", r".*")]

html_theme = "furo"
html_title = f"voxgrad {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_copy_source = False
html_show_sphinx = False
