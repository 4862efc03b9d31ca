"""Writes the reference pages of the documentation site from the XML files of Doxygen.

Doxygen parses the declarations and the /// comments of the public headers. A page lists its headers in the order of
PAGES, and the declarations of a header in the order of the file. Consecutive declarations without an empty line
between them share the comment of the first, as in the headers. A page also contains the remarks in // comments between
public declarations, such as the comment at the top of a header and titles ("// ---- title").

PAGES names the headers of each page. write() raises SystemExit if a public header is on no page, or if a public
declaration of a header is not written. These declarations are hidden and need no entry: deleted functions and friend
classes; the types that the standard library requires of iterators; destructors, copy and move functions without a
comment; functions without a comment that override a function; and the namespaces of HIDDEN.
"""
import re
import textwrap
import xml.etree.ElementTree as ElementTree

# {title of a group: [(file of a page, title of the page, [(header, title of the section)])]}
PAGES = {
    "Tensors": [
        ("tensor", "Tensor", [("core/tensor.h", ""), ("core/dims.h", "Shapes and axes"),
                              ("core/dtype.h", "Dtypes"), ("core/half.h", "16-bit floating-point numbers"),
                              ("core/device.h", "Devices and memory statistics"), ("core/error.h", "Errors")]),
        ("creation", "Creating tensors", [("ops/create.h", "Tensors with given or random values"),
                                          ("core/random.h", "Random number generators")]),
        ("autograd", "Autograd", [("core/autograd.h", "Gradients and custom functions"),
                                  ("nn/recompute.h", "Recomputation"), ("ops/gradcheck.h", "Gradient checks"),
                                  ("core/autocast.h", "Mixed precision"),
                                  ("core/precision.h", "Precision of float32")]),
    ],
    "Operators": [
        ("elementwise", "Elementwise functions and activations", [("ops/elementwise.h", "")]),
        ("reductions", "Reductions and sorting", [("ops/reduce.h", "Reductions"), ("ops/sort.h", "Sorting")]),
        ("shape", "Shapes and indices", [("ops/shape.h", "Views, concatenation and indexing"),
                                         ("ops/pad.h", "Padding"), ("ops/pixel_shuffle.h", "Pixel shuffle")]),
        ("linalg", "Matrix products and attention", [("ops/linalg.h", "")]),
        ("convolution", "Convolutions", [("ops/conv.h", ""), ("ops/fused.h", "Fused operations"),
                                         ("ops/activation.h", "Activations of fused operations")]),
        ("pooling", "Pooling", [("ops/pool.h", "")]),
        ("resampling", "Resampling", [("ops/interpolate.h", "Interpolation"),
                                      ("ops/grid_sample.h", "Sampling at a grid")]),
        ("normalization", "Normalization", [("ops/norm.h", "")]),
        ("losses", "Losses", [("ops/loss.h", "")]),
    ],
    "Networks": [
        ("modules", "Modules", [("nn/module.h", "Module"), ("nn/sequential.h", "Sequential"),
                                ("nn/init.h", "Initial values"), ("nn/fields.h", "Named state")]),
        ("layers", "Layers", [("nn/conv_layers.h", "Convolution layers"), ("nn/norm_layers.h", "Normalization layers"),
                              ("nn/layers.h", "Linear layers, activations and dropout"),
                              ("nn/pool_layers.h", "Pooling, upsampling and padding layers"),
                              ("nn/weight_norm.h", "Weight normalization")]),
        ("unet", "U-Net and sliding windows", [("nn/unet.h", "U-Net"), ("nn/sliding_window.h", "Sliding windows")]),
    ],
    "Training": [
        ("optimizers", "Optimizers", [("nn/optim/optimizers.h", ""),
                                      ("nn/optim/optimizer.h", "Base classes"),
                                      ("nn/optim/clip.h", "Gradient clipping"),
                                      ("nn/optim/grad_scaler.h", "Loss scaling"),
                                      ("nn/optim/ema.h", "Moving averages"),
                                      ("ops/optim.h", "Steps of the optimizers")]),
        ("schedules", "Learning-rate schedules", [("nn/optim/schedule.h", "")]),
        ("data", "Data", [("nn/data/loader.h", "Loader"), ("nn/data/dataset.h", "Datasets"),
                          ("nn/data/sampler.h", "Samplers"), ("nn/data/patches.h", "Patches of volumes"),
                          ("nn/data/augment.h", "Augmentation")]),
        ("checkpoints", "Checkpoints and logs", [("nn/checkpoint.h", "Checkpoints"),
                                                 ("nn/summary_writer.h", "TensorBoard")]),
        ("distributed", "Several ranks", [("nn/distributed/data_parallel.h", "Data parallelism"),
                                          ("nn/distributed/zero.h", "Sharded optimizers"),
                                          ("nn/distributed/run.h", "Starting ranks"),
                                          ("nn/distributed/communicator.h", "Communicators of a launcher"),
                                          ("nn/distributed/environment.h", "Environment"),
                                          ("core/communicator.h", "Communicator"),
                                          ("core/reduce_op.h", "Reduction operations"),
                                          ("ops/spatial.h", "One volume over several ranks")]),
    ],
    "Files and tools": [
        ("files", "Files", [("core/io/safetensors.h", "safetensors"), ("core/io/npy.h", "NumPy"),
                            ("core/io/nifti.h", "NIfTI"), ("core/io/pt.h", "PyTorch checkpoints"),
                            ("core/io/atomic_file.h", "Atomic writes")]),
        ("dlpack", "DLPack", [("core/dlpack.h", "")]),
        ("cuda", "CUDA", [("cuda/cuda.h", "")]),
        ("profiler", "Profiler", [("core/profiler.h", "")]),
        ("runtime", "Threads, storage and views", [("core/thread_pool.h", "Threads"),
                                                   ("ops/cpu_capability.h", "Instructions of the CPU kernels"),
                                                   ("core/storage.h", "Storage"),
                                                   ("core/view.h", "View"), ("core/scoped_value.h", "Guards"),
                                                   ("core/noncopyable.h", "Objects that cannot be copied"),
                                                   ("core/capture.h", "Capture of CUDA graphs")]),
    ],
}
# Declarations of core/autograd.h that users rarely need; they come after the others.
INTERNAL = {"Backward", "Hooks", "Edge", "Node", "AutogradData", "TensorBody", "needs_grad", "check_in_place",
            "autograd::edge_to", "autograd::record", "autograd::SavedOutput", "autograd::once_differentiable",
            "autograd::recomputing", "autograd::queue_callback", "autograd::reached_leaves"}
HIDDEN = ("std", "voxgrad::dlpack")  # std: specializations; dlpack: the structs of the DLPack standard


class Declaration:
    """A declaration of a header, or a remark between declarations."""

    def __init__(self, kind, line, name="", signature="", text="", end=None, position=(), key=""):
        self.kind = kind  # "remark", "title", or the name of a directive of Sphinx's C++ domain
        self.line = line
        self.end = end or line
        self.position = position or (line, 0)
        self.name = name  # without "voxgrad::"
        self.signatures = [signature]
        self.names = [name]
        self.text = text  # reStructuredText
        self.members = []
        self.forms = []  # the aliases that users use instead of this class template
        self.key = key  # Doxygen's id


# ---- text: Doxygen's XML and // comments become reStructuredText


def escaped(text):
    return re.sub(r"([\\`*|_])", r"\\\1", text)


def literal(text):
    return f"``{text}``" if text.strip() == text and text else escaped(text)


def plain(node):
    """Returns the text of a node without markup."""
    parts = [" " if node.tag == "sp" else node.text or ""]
    for child in node:
        parts.append(plain(child) + (child.tail or ""))
    return "".join(parts) + ("\n" if node.tag == "codeline" else "")


def indented(text, by=3):
    return "\n".join(" " * by + line if line.strip() else "" for line in text.splitlines())


def code_block(text):
    return ".. code-block:: c++\n\n" + indented(text.strip("\n"))


def block(node):
    """Returns a list or a block of code."""
    if node.tag == "itemizedlist":
        return "\n".join("-" + indented(description(item), 2)[1:] for item in node.findall("listitem"))
    return code_block(plain(node))


def description(node):
    """Returns the text of a description or of a list item."""
    parts = []
    for child in node if node is not None else ():
        if child.tag in BLOCKS:
            parts.append(block(child))
        elif child.tag == "para":
            text = escaped(child.text or "")
            for part in child:
                if part.tag == "computeroutput":
                    text += literal(plain(part))
                elif part.tag == "ulink":
                    text += f"`{escaped(plain(part))} <{part.get('url')}>`__"
                elif part.tag in ("ndash", "mdash"):  # "--"
                    text += "-" * (2 if part.tag == "ndash" else 3)
                elif part.tag in BLOCKS:
                    text += "\n\n" + block(part) + "\n\n"
                elif part.tag in ("ref", "emphasis", "bold"):
                    text += escaped(plain(part))
                else:
                    raise ValueError(f"reference.py does not support <{part.tag}>: {plain(child)}")
                text += escaped(part.tail or "").lstrip(" ") if part.tag in BLOCKS else escaped(part.tail or "")
            parts.append(text.strip())
        else:
            raise ValueError(f"reference.py does not support <{child.tag}>: {plain(child)}")
    return "\n\n".join(part for part in parts if part)


BLOCKS = ("itemizedlist", "verbatim", "programlisting", "preformatted")


def remark(lines):
    """Returns the text of a // comment, which contains paragraphs, lists, and code that is indented by four spaces."""
    parts, code = [], []
    for line in [*lines, ""]:
        if line.startswith("    "):
            code.append(line)
            continue
        if code:
            parts += ["", code_block("\n".join(text[4:] for text in code)), ""]
            code = []
        if line.startswith("- ") and parts and not parts[-1].startswith(("- ", "  ")):
            parts.append("")
        pieces = line.split("`")
        parts.append("".join(literal(piece) if i % 2 else escaped(piece) for i, piece in enumerate(pieces)))
    return "\n".join(parts).strip()


# ---- declarations


def child_text(node, tag):
    child = node.find(tag)
    return re.sub(r"\s+", " ", plain(child)).strip() if child is not None else ""


def comment(node):
    parts = (description(node.find("briefdescription")), description(node.find("detaileddescription")))
    return "\n\n".join(part for part in parts if part)


def template(node):
    """Returns "template<...> requires ... " for a template, otherwise an empty string."""
    if node.find("templateparamlist") is None:
        return ""
    parameters = []
    for param in node.find("templateparamlist"):
        text, name, value = (child_text(param, tag) for tag in ("type", "declname", "defval"))
        if "(*)" in text:
            text = text.replace("(*)", f"(*{name})")
        elif name and not re.search(rf"\b{name}\b", text):
            text += f" {name}"
        parameters.append(text + (f" = {value}" if value else ""))
    clause = child_text(node, "requiresclause")
    return f"template<{', '.join(parameters)}> " + (f"requires {clause} " if clause else "")


def is_hidden(node):
    """Returns whether a public declaration needs no entry."""
    arguments, name = child_text(node, "argsstring"), node.findtext("name")
    if "=delete" in arguments.replace(" ", "") or (node.get("kind") == "friend" and "(" not in arguments):
        return True
    if name in ("iterator_category", "value_type", "difference_type", "pointer", "reference"):
        return True
    if comment(node):
        return False
    if node.find("reimplements") is not None or name.startswith("~") or re.search(r"\boverride\b", arguments):
        return True
    types = [child_text(param, "type") for param in node.findall("param")]
    return name in ("operator=", *node.findtext("qualifiedname", "").split("::")[-2:-1]) and any(
        re.fullmatch(r"(const )?\w+ ?&&?", text) and re.search(r"\w+", text.replace("const ", ""))[0]
        == node.findtext("qualifiedname").split("::")[-2] for text in types)


def member(node, prefix):
    """Returns the declaration of a function, variable, alias, enum or macro."""
    kind, name = node.get("kind"), prefix + node.findtext("name")
    arguments, result, value = (child_text(node, tag) for tag in ("argsstring", "type", "initializer"))
    result = re.sub(r"\b(inline|constexpr|friend|virtual|explicit|static)\b ?|\[\[.*?\]\] ?", "", result)
    location = node.find("location")
    line = int(location.get("line"))
    static = "static " if node.get("static") == "yes" and prefix == "" else ""
    if kind in ("function", "friend"):
        arguments = re.sub(r"\b(override|noexcept|final)\b|=\s*(0|default)$", "", arguments)
        directive, signature = "function", f"{template(node)}{static}{result} {name}{arguments}"
    elif kind == "variable":
        value = value if len(value) < 60 else ""
        result = re.sub(r"^struct voxgrad::(\w+::)*", "", result)  # "struct Name {...} name;"
        directive, signature = "member", f"{template(node)}{static}{result} {name}{arguments} {value}"
    elif kind == "typedef":
        short = len(result) < 70 and not re.search(r'"|<.*,.*>', result)
        directive, signature = "type", template(node) + name + (f" = {result}" if short else "")
    elif kind == "enum":
        directive, signature = "enum-class" if node.get("strong") == "yes" else "enum", name
    elif kind == "define":
        parameters = ", ".join(param.findtext("defname") for param in node.findall("param"))
        directive, signature, name = "macro", node.findtext("name") + (f"({parameters})" if parameters else ""), name
    else:
        raise ValueError(f"reference.py does not support the kind {kind}: {name}")
    end = int(location.get("bodyend") or -1) if kind in ("function", "friend", "enum") else -1
    result = Declaration(directive, line, name, re.sub(r"\s+", " ", signature).strip(), comment(node),
                         max(end, line), (line, int(location.get("column") or 0)), node.get("id"))
    for number, enumerator in enumerate(node.findall("enumvalue")):
        result.members.append(Declaration("enumerator", line, enumerator.findtext("name"), enumerator.findtext("name"),
                                          comment(enumerator), None, (line, number)))
    return result


def is_family(first, other):
    """Returns whether the comment of a declaration also describes the next declaration, which has no comment.

    A comment that begins with a plural verb ("Return") or a plural noun ("Comparisons") describes several functions. A
    comment that begins with a verb in the third person ("Returns") describes one function, its overloads, and its
    variants for other numbers of axes.
    """
    if first.kind != other.kind or first.kind not in ("function", "member"):
        return False
    if not first.text or first.line == other.line:
        return True
    stems = {re.sub(r"[123]d", "", name.rsplit("::", 1)[-1]) for name in first.names[-1:] + other.names}
    return first.kind == "function" and (len(stems) == 1 or not re.match(
        r"(?!Comparisons|Functions|Activations|Arithmetic)[A-Z]?\w*s\b|[a-z]", first.text))


class Headers:
    """The declarations of all public headers."""

    def __init__(self, root, xml):
        self.root = root
        self.lines = {}  # header: lines
        self.compounds, self.expected, self.written = {}, {}, set()
        for path in sorted(xml.glob("*.xml")):
            for compound in ElementTree.parse(path).getroot().findall("compounddef"):
                self.compounds[compound.get("id")] = compound
        self.classes = {compound.findtext("compoundname"): compound for compound in self.compounds.values()
                        if compound.get("kind") in ("class", "struct")}
        for compound in self.compounds.values():
            self.expect(compound)

    def expect(self, compound):
        """Stores the ids of public declarations that must be on a page."""
        name = compound.findtext("compoundname")
        if compound.get("kind") not in ("namespace", "class", "struct", "file") or self.is_hidden_name(name):
            return
        if compound.get("kind") in ("class", "struct"):
            if not self.is_public(compound):
                return
            self.expected[compound.get("id")] = name
        for node in compound.iter("memberdef"):
            if compound.get("kind") == "file" and node.get("kind") != "define":
                continue
            # Some versions of Doxygen mark members of namespaces as private.
            if (node.get("prot") == "public" or compound.get("kind") == "namespace") and not is_hidden(node):
                self.expected[node.get("id")] = f"{name}::{node.findtext('name')}"

    @staticmethod
    def is_hidden_name(name):
        return any(name == hidden or name.startswith(hidden + "::") for hidden in HIDDEN) or "::detail" in name

    def is_public(self, compound):
        """Returns whether a class and the classes around it are public. Classes in a namespace are public."""
        around = self.classes.get(compound.findtext("compoundname").rsplit("::", 1)[0])
        return around is None or (compound.get("prot") == "public" and self.is_public(around))

    def source(self, header):
        if header not in self.lines:
            self.lines[header] = (self.root / header).read_text(encoding="utf-8").splitlines()
        return self.lines[header]

    def remarks(self, header, first, last, indent):
        """Returns the titles and remarks in the // comments between the lines `first` and `last`."""
        lines, found, number = self.source(header), [], first
        comment_line = re.compile(rf"{' ' * indent}//(?!/) ?(.*)")
        while number <= last:
            block = []
            while number + len(block) <= last and (match := comment_line.fullmatch(lines[number + len(block) - 1])):
                block.append(match[1])
            if not block:
                number += 1
                continue
            title = re.fullmatch(r"-{4} (.*)", block[0])
            if title:
                found.append(Declaration("title", number, text=escaped(title[1][0].upper() + title[1][1:])))
                found.append(Declaration("remark", number, text=remark(block[1:]), position=(number, 1)))
            else:
                found.append(Declaration("remark", number, text=remark(block)))
            number += len(block)
        return found

    def class_of(self, compound, prefix):
        """Returns the declaration of a class with its public members."""
        name = compound.findtext("compoundname")
        location = compound.find("location")
        header, line = location.get("file"), int(location.get("line"))
        end = int(location.get("bodyend") or line)
        own = prefix + name.rsplit("::", 1)[-1]
        bases = [re.sub(r"^voxgrad::", "", plain(base)) for base in compound.findall("basecompoundref")
                 if base.get("prot") == "public"]
        bases = [base for base in bases if not re.search(r'"|detail', base)]
        signature = template(compound) + own + (" : public " + ", public ".join(bases) if bases else "")
        result = Declaration(compound.get("kind"), line, own, signature, comment(compound), end,
                             (line, int(location.get("column") or 0)), compound.get("id"))
        members = [member(node, "") for node in compound.iter("memberdef") if node.get("id") in self.expected]
        members += [self.class_of(self.compounds[inner.get("refid")], "") for inner in compound.findall("innerclass")
                    if inner.get("refid") in self.expected]
        for number in range(line, end):  # remarks about private members do not belong to the page
            if re.fullmatch(r" *(private|protected):", self.source(header)[number]):
                end = number
                break
        indent = len(self.source(header)[line - 1]) - len(self.source(header)[line - 1].lstrip()) + 2
        result.members = self.families(header, members + self.remarks(header, line, end, indent))
        for base in (re.sub(r"<.*|.*::", "", base) for base in bases):  # "using Base::Base" declares constructors
            for entry in result.members:
                if entry.name == base:
                    constructor = own.rsplit("::", 1)[-1] + "("
                    entry.signatures = [re.sub(rf"\b{base}\(", constructor, text) for text in entry.signatures]
        return result

    def families(self, header, declarations):
        """Orders declarations, and appends each declaration without a comment to the declaration before it."""
        lines, result = self.source(header), []
        templates = {entry.name.rsplit("::", 1)[-1]: entry
                     for entry in declarations if entry.kind in ("class", "struct")}
        for declaration in sorted(declarations, key=lambda entry: entry.position):
            self.written.add(declaration.key)
            if declaration.kind == "type" and not declaration.text:
                target = lines[declaration.line - 1].split("=", 1)[-1]
                template = templates.get(re.match(r"\s*(\w*)", target)[1])
                if template and re.match(r"\s*\w+<", target):
                    template.forms.append(declaration)
                    continue
            last = result[-1] if result else None
            adjacent = last and all(line.strip() for line in lines[last.end:declaration.line - 1]) and (
                not last.text or "///<" not in lines[last.end - 1])  # a trailing comment belongs to one declaration
            if adjacent and not declaration.text and is_family(last, declaration):
                last.signatures += declaration.signatures
                last.names += declaration.names
                last.end = max(last.end, declaration.end)
            elif declaration.kind != "remark" or declaration.text:
                result.append(declaration)
        return result

    def declarations(self, header):
        """Returns the declarations of a header."""
        found = []
        for compound in self.compounds.values():
            name = compound.findtext("compoundname")
            if compound.get("kind") not in ("namespace", "file") or self.is_hidden_name(name):
                continue
            prefix = name.removeprefix("voxgrad").removeprefix("::")
            prefix = prefix + "::" if prefix and compound.get("kind") == "namespace" else ""
            nodes = compound.iter("memberdef")
            found += [member(node, prefix) for node in nodes if node.find("location").get("file") == header
                      and node.get("id") in self.expected
                      and (node.get("kind") == "define") == (compound.get("kind") == "file")]
            if compound.get("kind") == "namespace":
                inner = [self.compounds[node.get("refid")] for node in compound.findall("innerclass")]
                found += [self.class_of(node, prefix) for node in inner if node.get("id") in self.expected
                          and node.find("location").get("file") == header]
        return self.families(header, found + self.remarks(header, 1, len(self.source(header)), 0))


# ---- pages


class Writer:
    """Writes declarations as directives of Sphinx's C++ domain."""

    def __init__(self, examples):
        self.examples = examples
        self.shown = set()

    def entry(self, declaration, scope=""):
        """Returns the lines of a declaration with its comment, example and members."""
        if declaration.kind == "remark":
            return declaration.text + "\n\n"
        if declaration.kind == "title":
            return f".. rubric:: {declaration.text}\n\n"
        if declaration.forms:
            forms = declaration.forms
            merged = Declaration("type", declaration.line, text=declaration.text)
            merged.signatures = [signature for form in forms for signature in form.signatures]
            merged.names = [name for form in forms for name in form.names]
            declaration.text, declaration.forms = "The template of the types above.", []
            return self.entry(merged, scope) + self.entry(declaration, scope)
        domain = "c" if declaration.kind == "macro" else "cpp"
        start = f".. {domain}:{declaration.kind}:: "
        text = start + ("\n" + " " * len(start)).join(declaration.signatures) + "\n\n"
        if declaration.text:
            text += indented(declaration.text) + "\n\n"
        for name in declaration.names:
            if (example := scope + name) in self.examples and example not in self.shown:
                self.shown.add(example)
                text += indented(self.examples[example]) + "\n\n"
        for inner in declaration.members:
            text += indented(self.entry(inner, scope + declaration.name + "::")) + "\n\n"
        return text


def heading(text, mark):
    return f"{text}\n{mark * len(text)}\n\n"


def read_examples(root):
    """Returns the examples of the reference: {name: block of code}.

    An example is the code between "// [NAME]" and the next "// [end]" in a source of examples/reference. The tests
    compile and run these sources.
    """
    examples = {}
    for path in sorted((root / "examples/reference").glob("*.cpp")):
        text = path.read_text(encoding="utf-8")
        pattern = r"^ *// \[(?!end\])([^\]\n]*)\]\n(.*?)^ *// \[end\]$"
        for name, code in re.findall(pattern, text, re.MULTILINE | re.DOTALL):
            if name in examples:
                raise SystemExit(f"{path}: a second example for {name}")
            examples[name] = code_block(textwrap.dedent(code))
    return examples


def installed_headers(root):
    """Returns the headers that CMakeLists.txt installs."""
    private = re.compile(r"(^|/)detail/|^ops/cpu/|^cuda/conv/")
    headers = [path.relative_to(root).as_posix() for folder in ("core", "ops", "nn", "cuda")
               for path in (root / folder).rglob("*.h")]
    return {header for header in headers if not private.search(header)}


def write(site, root, xml):
    """Writes the pages into the folder `reference` of the site."""
    listed = [header for pages in PAGES.values() for _, _, headers in pages for header, _ in headers]
    if faults := installed_headers(root).symmetric_difference(listed):
        names = ", ".join(sorted(faults))
        raise SystemExit(f"docs/site/reference.py: PAGES must name each public header once: {names}")
    headers, writer = Headers(root, xml), Writer(read_examples(root))
    overview, undescribed = heading("Reference", "=") + OVERVIEW, []
    for group, pages in PAGES.items():
        overview += heading(group, "-")
        for page, title, sections in pages:
            text = heading(title, "=") + ".. cpp:namespace:: voxgrad\n\n"
            if len(sections) > 1:
                text += ", ".join(f":ref:`{section or title} <{header}>`" for header, section in sections) + "\n\n"
            names = {}
            for header, section in sections:
                declarations = headers.declarations(header)
                undescribed += [f"{header}:{entry.line}: {entry.name}" for entry in declarations
                                if not entry.text and entry.kind not in ("remark", "title")]
                # The class that a section is about comes before its helpers.
                subject = re.sub(r"\W", "", section or title).lower()
                declarations.sort(key=lambda entry: 1 - (entry.line == 1) * 2 - (
                    entry.kind in ("class", "struct") and entry.name.rsplit("::", 1)[-1].lower() == subject)
                    + (entry.name in INTERNAL))
                internal = [entry.name in INTERNAL for entry in declarations]
                if any(internal):
                    rubric = "The recorded graph, for implementations of operators and hooks"
                    declarations.insert(internal.index(True), Declaration("title", 0, text=rubric))
                text += f".. _{header}:\n\n" + (heading(section, "-") if section else "")
                text += f".. container:: header\n\n   `{header} <{site.link_to_source(header)}>`__\n\n"
                for declaration in declarations:
                    if declaration.kind not in ("remark", "title"):
                        names |= dict.fromkeys([form.name for form in declaration.forms] or declaration.names,
                                               declaration.kind)
                    text += writer.entry(declaration)
            site.write(f"reference/{page}.rst", text)
            links = ", ".join(f":c:macro:`{name}`" if kind == "macro" else f":cpp:any:`{name} <voxgrad::{name}>`"
                              for name, kind in names.items()
                              if re.fullmatch(r"[\w:]+", name) and "operator" not in name)
            overview += f":doc:`{title} <{page}>`\n{indented(links)}\n\n"
    for group, pages in PAGES.items():
        overview += f".. toctree::\n   :hidden:\n   :caption: {group}\n\n"
        overview += "".join(f"   {page}\n" for page, _, _ in pages) + "\n"
    site.write("reference/index.rst", overview)
    if missing := sorted(name for key, name in headers.expected.items() if key not in headers.written):
        raise SystemExit("docs/site/reference.py: no page contains these declarations:\n  " + "\n  ".join(missing))
    if undescribed:
        raise SystemExit("docs/site/reference.py: these declarations have no comment:\n  " + "\n  ".join(undescribed))
    if unused := sorted(set(writer.examples) - writer.shown):
        raise SystemExit(f"docs/site/reference.py: these examples belong to no declaration: {', '.join(unused)}")


OVERVIEW = """This reference lists the declarations of the public headers. ``#include <voxgrad.h>`` includes all
of these headers. All names are in the namespace ``voxgrad``.

"""
