#!/usr/bin/env python3
"""Builds the documentation site from the Markdown pages and the public headers.

    docs/site/build.py

The site is written to build/docs/html. The script needs Doxygen, Sphinx, MyST-Parser and the theme Furo, but no
network. Each warning is an error.

1. Copies README.md and the other Markdown pages to build/docs/source, with their pictures. Links to source files lead
   to pages that show these files.
2. Runs Doxygen (Doxyfile) and writes a page for each section of reference.py.
3. Runs Sphinx (conf.py) on build/docs/source.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

import reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
SITE = ROOT / "docs/site"
BUILD = ROOT / "build/docs"
SOURCE = BUILD / "source"
LINK = re.compile(r"(\]\(<?)([^()<>\s#]+)(#[^()<>\s]*)?(>?(?:\s+\"[^\"]*\")?\))")
NAMED = re.compile(r"\[(?:[\w/-]+/)?([\w-]+\.md)\](\(((?:[^()\s]+/)?\1)(?:#[^()\s]*)?\))")


class Site:
    """The folder of Sphinx's sources. Unchanged files keep their times, so that Sphinx does not read them again."""

    def __init__(self):
        self.written = set()
        self.shown = set()  # files and folders of the repository to which pages link

    def write(self, name, content):
        path = SOURCE / name
        self.written.add(path)
        content = content.encode() if isinstance(content, str) else content
        if path.exists() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def link_to_source(self, path):
        """Returns a link to the page that shows a file or a folder of the repository. conf.py writes these pages."""
        self.shown.add(path)
        if (ROOT / path).is_dir():
            self.shown.update(f"{path}/{name.name}" for name in (ROOT / path).iterdir() if name.is_file())
        return f"source:{path}"

    def remove_others(self):
        """Removes the files of earlier builds."""
        for path in SOURCE.rglob("*"):
            if path.is_file() and path not in self.written:
                path.unlink()


def links_for_site(site, page, text):
    """Returns the text of a page with links that work in the site."""

    def replace(match):
        before, target, anchor, after = match[1], match[2], match[3] or "", match[4]
        path = os.path.normpath(os.path.join(os.path.dirname(page), target))
        if path == "README.md":
            return before + os.path.relpath("index.md", os.path.dirname(page) or ".") + anchor + after
        if re.match(r"[a-z][a-z0-9+.-]*:", target) or target.endswith((".md", ".svg", ".png")):
            return match[0]
        if (ROOT / path / "README.md").is_file():
            return before + os.path.relpath(f"{path}/README.md", os.path.dirname(page) or ".") + anchor + after
        if (ROOT / path).exists():
            return before + site.link_to_source(path) + after
        return match[0]

    def titled(match):
        """Replaces the name of a page by its title: "[pitfalls.md](pitfalls.md)"."""
        path = (ROOT / page).parent / match[3]
        title = path.read_text(encoding="utf-8").split("\n", 1)[0] if path.exists() else ""
        return f"[{title[2:]}]{match[2]}" if title.startswith("# ") else match[0]

    lines, fence = [], None
    for line in text.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and (fence is None or line.strip() == fence):
            fence = mark[1] if fence is None else None
        lines.append(line if fence else LINK.sub(replace, NAMED.sub(titled, line)))
    return "\n".join(lines) + "\n"


def copy_pages(site):
    """Copies the Markdown pages and their pictures. The index is README.md with navigation.md."""
    navigation = (SITE / "navigation.md").read_text(encoding="utf-8")
    others = ""
    for page in [path for folder in ("", "docs/", "docs/decisions/") for path in sorted(ROOT.glob(f"{folder}*.md"))]:
        name = page.relative_to(ROOT).as_posix()
        text = links_for_site(site, name, page.read_text(encoding="utf-8"))
        if name == "README.md":
            index = text
            continue
        if name == "docs/decisions/README.md":
            pages = "\n".join(re.findall(r"\]\(([\w-]+)\.md\)", text))
            text += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
        site.write(name, text)
        link = f"/{name.removesuffix('.md')}\n"
        if "decisions" not in name and link not in navigation:
            others += link
    for picture in (ROOT / "docs/img").iterdir():
        site.write(f"docs/img/{picture.name}", picture.read_bytes())
    site.write("index.md", index + navigation.replace("% other pages\n", others))


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    site = Site()
    copy_pages(site)
    shutil.rmtree(BUILD / "xml", ignore_errors=True)
    doxygen = subprocess.run(["doxygen", "docs/site/Doxyfile"], cwd=ROOT)
    if doxygen.returncode:
        return doxygen.returncode
    reference.write(site, ROOT, BUILD / "xml")
    site.write("sources.txt", "\n".join(sorted(site.shown)))
    site.remove_others()
    info = BUILD / "html/.buildinfo"
    if info.exists() and any(path.stat().st_mtime > info.stat().st_mtime for path in SITE.rglob("*")):
        info.unlink()  # lets Sphinx write all pages, because it ignores changes of style sheets and of conf.py
    command = ["sphinx-build", "-q", "-W", "--keep-going", "-n", "-j", "auto", "-c", SITE, "-d", BUILD / "doctrees",
               SOURCE, BUILD / "html"]
    return subprocess.run(command).returncode


sys.exit(main())
