"""merge.py TREE MAP.txt: move the modules of gpurun as the map says, and rewrite all importers. Prints what a person must settle.

The map's format is plan.py's. Lines `! PACKAGE: docstring` give a new package its docstring, `= module:name newname` renames
a name. References are found by LibCST's scopes, so a local variable with a moved name stays.
"""
from __future__ import annotations
import re, sys, textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
import libcst as cst
from libcst.metadata import MetadataWrapper, ScopeProvider, GlobalScope, ImportAssignment, Assignment, ParentNodeProvider, PositionProvider
from plan import read_map
from tree import load, name_of

TREE = Path(sys.argv[1])
MAP = sys.argv[2]
PROBLEMS: list[str] = []
EXTRA: dict[int, list[str]] = {}   # an import node -> lines instead of the module's
DIRECT: set[tuple[str, str]] = set()
ALIASED: set[tuple[str, str]] = set()   # (source, name): a module that keeps its old name there

def problem(text): PROBLEMS.append(text)

@dataclass(frozen=True)
class Target:
    """What an import binds: a module (name None) or a name of it."""
    module: str
    name: str | None = None

@dataclass
class Binding:
    target: Target
    types: bool          # only under TYPE_CHECKING
    node: object

@dataclass
class Source:
    name: str            # old module name, or a file's path
    path: Path
    wrapper: MetadataWrapper
    scope: GlobalScope
    imports: dict[str, Binding] = field(default_factory=dict)   # at module level
    defs: list[str] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)     # names that any scope binds

def dotted(node): return cst.Module([]).code_for_node(node)

def is_types_if(node):
    return isinstance(node, cst.If) and "TYPE_CHECKING" in dotted(node.test)

def top_imports(module):
    """(statement line, import node, under TYPE_CHECKING) at module level."""
    def of(body, types):
        for line in body:
            if isinstance(line, cst.SimpleStatementLine):
                for small in line.body:
                    if isinstance(small, (cst.Import, cst.ImportFrom)): yield small, types
            elif is_types_if(line): yield from of(line.body.body, True)
    yield from of(module.body, False)

def aliases(node):
    """(bound name, Target, asname) of an import."""
    if isinstance(node, cst.Import):
        for a in node.names:
            full = dotted(a.name)
            if a.asname: yield dotted(a.asname.name), Target(full), True
            else: yield full.split(".")[0], Target(full), False
        return
    if node.relative or isinstance(node.names, cst.ImportStar): return
    base = dotted(node.module)
    for a in node.names:
        name = dotted(a.name)
        yield (dotted(a.asname.name) if a.asname else name), Target(base, name), a.asname is not None

def read(path, name):
    wrapper = MetadataWrapper(cst.parse_module(path.read_text()))
    scopes = wrapper.resolve(ScopeProvider)
    scope = next((s for s in scopes.values() if isinstance(s, GlobalScope)), None)
    source = Source(name, path, wrapper, scope)
    source.bound = {each.name for s in set(scopes.values()) if s is not None for each in s.assignments}
    for node, types in top_imports(wrapper.module):
        for bound, target, _ in aliases(node):
            if isinstance(node, cst.ImportFrom) and target.module == "__future__": continue
            source.imports[bound if not (isinstance(node, cst.Import) and "." in target.module and bound == target.module.split(".")[0]) else target.module] = Binding(target, types, node)
    if scope is not None:
        for each in scope.assignments:
            if isinstance(each, ImportAssignment): continue
            if isinstance(each, Assignment) and each.name not in source.defs: source.defs.append(each.name)
    return source

old_modules = load(TREE)
NEW_OF, ORDER = read_map(MAP, old_modules)
if "--only" in sys.argv:  # one room: the new modules with these prefixes
    only = tuple(sys.argv[sys.argv.index("--only") + 1].split(","))
    chosen = {new for new in ORDER if new in only or new.startswith(tuple(each + "." for each in only))}
    NEW_OF = {old: new if new in chosen else old for old, new in NEW_OF.items()}
    ORDER = {}
    for old in old_modules: ORDER.setdefault(NEW_OF[old], [])
    for new, olds in read_map(MAP, old_modules)[1].items():
        for old in olds: ORDER[NEW_OF[old]].append(old)
DOCS, RENAMES = {}, {}
for raw in open(MAP):
    if raw.startswith("! "):
        package, _, text = raw[2:].partition(":"); DOCS[package.strip()] = text.strip()
    if raw.startswith("= "):
        where, new = raw[2:].split(); old, _, name = where.partition(":"); RENAMES[(f"gpurun.{old}", name)] = new

changed = {new for new, olds in ORDER.items() if olds != [new] or any(old == olds[0] for old, _ in RENAMES)}
moved = {old for new in changed for old in ORDER[new]}
sources = {old: read(old_modules[old].path, old) for old in moved}

# ---- equal constants of two modules become one
def constants(source):
    """Names that a statement of one line assigns a constant -> the statement."""
    out = {}
    for line in source.wrapper.module.body:
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 and isinstance(line.body[0], cst.Assign):
            names = re.findall(r"\w+", dotted(line.body[0].targets[0].target))
            for name in names: out[name] = (line, dotted(line.body[0]), names)
    return out
EQUAL: set[tuple[str, str]] = set()   # (old module, name): an earlier module of the group has the same statement
EQUAL_LINES: dict[str, list] = defaultdict(list)
for new in sorted(changed):
    before = {}
    for old in ORDER[new]:
        for name, (line, code, names) in constants(sources[old]).items():
            if before.get(name) == code and all(before.get(each) == code for each in names) and not name.startswith("OPS"):
                EQUAL.add((old, name))
                if line not in EQUAL_LINES[old]: EQUAL_LINES[old].append(line)
            before.setdefault(name, code)

# ---- final names of definitions --------------------------------------------------------------------------------------
final: dict[tuple[str, str], str] = {}
for new in sorted(changed):
    owner: dict[str, str] = {}
    for old in ORDER[new]:
        for name in sources[old].defs:
            wanted = RENAMES.get((old, name), name)
            if name in ("__all__",): continue
            if (old, name) in EQUAL: final[old, name] = name; continue
            if wanted in owner:
                leaf = old.rpartition(".")[2]
                wanted = f"{wanted}_of_{leaf}" if not wanted.isupper() else f"{wanted}_OF_{leaf.upper()}"
                if not name.startswith("_"): problem(f"{new}: {name} of {owner[RENAMES.get((old, name), name)]} and {old}: the second is {wanted}")
            owner[wanted] = old
            final[old, name] = wanted

def is_module(target): return target.name is not None and f"{target.module}.{target.name}" in old_modules

def new_target(target: Target) -> Target:
    """Where an imported thing is after the move."""
    if target.name is None:
        return Target(NEW_OF.get(target.module, target.module))
    full = f"{target.module}.{target.name}"
    if full in old_modules:
        new = NEW_OF[full]; base, _, leaf = new.rpartition(".")
        return Target(base, leaf)
    if target.module in moved:
        return Target(NEW_OF[target.module], final.get((target.module, target.name), target.name))
    return target

# ---- rewriting one source ---------------------------------------------------------------------------------------------
class Rewrite(cst.CSTTransformer):
    """Replaces nodes by identity; drops imports at module level where asked; rewrites lazy imports."""
    def __init__(self, table, drop, lazy):
        self.table, self.drop, self.lazy = table, drop, lazy
    def on_leave(self, original, updated):
        if original in self.drop: return cst.RemoveFromParent()
        if original in self.table: return self.table[original]
        if original in self.lazy:
            return self.lazy[original](updated)
        return super().on_leave(original, updated)

def import_lines(target: Target, bound: str) -> str:
    if target.name is None:
        return f"import {target.module}" if bound == target.module else f"import {target.module} as {bound}"
    return f"from {target.module} import {target.name}" + (f" as {bound}" if bound != target.name else "")

def parse_expression(text): return cst.parse_expression(text)

def plan_source(source, group, taken):
    """Return (table, binding after the move: name -> (target, types) for those that stay imports)."""
    table, kept = {}, {}
    module_new = NEW_OF.get(source.name)
    parents = source.wrapper.resolve(ParentNodeProvider)
    def references(assignment): return [a.node for a in assignment.references]
    by_name = defaultdict(list)
    for each in source.scope.assignments: by_name[each.name].append(each)
    # own definitions
    for name in source.defs:
        new = final.get((source.name, name), name)
        if new == name: continue
        for each in by_name[name]:
            if isinstance(each, ImportAssignment): continue
            node = each.node
            rename_definition(table, node, name, new, source)
            for ref in references(each): put_name(table, ref, name, new)
    # imports at module level
    for bound, binding in source.imports.items():
        target = binding.target
        new = new_target(target)
        if target.name is None and "." in target.module and bound == target.module:  # import a.b.c
            after = NEW_OF.get(target.module, target.module)
            kept[after] = (Target(after), binding.types)
            for each in by_name.get(bound.split(".")[0], []) + by_name.get(bound, []):
                for ref in references(each):
                    if dotted(ref) == target.module and after != target.module: table[ref] = parse_expression(after)
            continue
        refs = [ref for each in by_name[bound] for ref in references(each)]
        if is_module(target) or (target.name is None and target.module in old_modules):
            full = f"{target.module}.{target.name}" if target.name else target.module
            inside = group is not None and NEW_OF[full] == group
            explicit = bound if target.name is not None and bound != target.name else None   # an alias a person chose
            local = explicit or (new.name if new.name else bound)
            direct = not inside and local != bound and local in source.bound  # the module's new name is another thing here
            if direct and any(not isinstance(parents.get(ref), cst.Attribute) or isinstance(parents.get(parents[ref]), cst.AssignTarget) for ref in refs):
                explicit = local = bound; direct = False   # the module keeps its old name here
                ALIASED.add((source.name, bound))
            if direct:
                after = f"{new.module}.{new.name}"
                for ref in refs:
                    parent = parents[ref]; attr = final.get((full, parent.attr.value), parent.attr.value)
                    mine = attr if attr not in source.bound and (attr not in kept or kept[attr][0] == Target(after, attr)) else f"{attr}_of_{local}"
                    kept[mine] = (Target(after, attr), binding.types); table[parent] = cst.Name(mine)
                    if mine != attr: problem(f"{source.name}: {mine} for {after}.{attr}")
                EXTRA.setdefault(id(binding.node), []).extend(import_lines(t, b) for b, (t, _) in kept.items() if t.module == after)
                DIRECT.add((source.name, bound))
                continue
            for ref in refs:
                parent = parents.get(ref)
                if isinstance(parent, cst.Attribute) and parent.value is ref:
                    attr = parent.attr.value
                    attr_new = final.get((full, attr), attr)
                    if inside:
                        if attr_new in source.bound: problem(f"{source.name}: {dotted(parent)} becomes {attr_new}, which a scope binds")
                        table[parent] = cst.Name(attr_new)
                    else: table[parent] = parent.with_changes(value=cst.Name(local), attr=cst.Name(attr_new))
                elif inside: problem(f"{source.name}: module {full} of the same group used as a value: {dotted(parent)[:80]}")
                else:
                    put_name(table, ref, bound, local)
                    if isinstance(parent, cst.Arg):
                        call = parents[parent]
                        if isinstance(call, cst.Call) and len(call.args) > 1 and call.args[0] is parent and isinstance(call.args[1].value, cst.SimpleString):
                            attr = call.args[1].value.evaluated_value
                            if final.get((full, attr), attr) != attr: table[call.args[1].value] = cst.SimpleString(f'"{final[full, attr]}"')
            if not inside:
                if local in kept and kept[local][0] != new: problem(f"{source.name}: {local} is bound to {kept[local][0]} and {new}")
                kept[local] = (new, binding.types and kept.get(local, (0, True))[1])
            continue
        inside = group is not None and target.module in moved and NEW_OF[target.module] == group
        if inside:
            if new.name != bound and new.name in source.bound and refs: problem(f"{source.name}: {bound} becomes {new.name}, which a scope binds")
            for ref in refs: put_name(table, ref, bound, new.name)
            continue
        local = bound
        if target.name is not None and bound == target.name and new.name != target.name:
            local = new.name
            if local in source.bound and refs: problem(f"{source.name}: {bound} becomes {local}, which a scope binds")
            for ref in refs: put_name(table, ref, bound, local)
        elif bound != target.name and target.name is not None and new.name == bound: local = bound
        kept[local] = (new, binding.types and kept.get(local, (0, True))[1])
    return table, kept

def put_name(table, ref, old, new):
    if old == new: return
    if isinstance(ref, cst.Name): table[ref] = ref.with_changes(value=new)
    elif isinstance(ref, cst.Attribute):
        node = ref
        while isinstance(node.value, cst.Attribute): node = node.value
        table[node.value] = cst.Name(new)
    elif isinstance(ref, (cst.SimpleString, cst.ConcatenatedString)):
        table[ref] = parse_expression(re.sub(rf"\b{old}\b", new, dotted(ref)))

def rename_definition(table, node, old, new, source):
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)): table[node.name] = node.name.with_changes(value=new)
    elif isinstance(node, cst.Name): table[node] = node.with_changes(value=new)
    elif isinstance(node, (cst.Assign, cst.AnnAssign)): problem(f"{source.name}: rename {old} by hand")
    else: problem(f"{source.name}: cannot rename {old}: {type(node).__name__}")

def lazy_imports(source, group, table):
    """Imports inside of functions: node -> function that rewrites it. Fills the table with the references."""
    out, drop = {}, set()
    parents = source.wrapper.resolve(ParentNodeProvider)
    scopes = source.wrapper.resolve(ScopeProvider)
    top = {id(node) for node, _ in top_imports(source.wrapper.module)}
    found = []
    class Find(cst.CSTVisitor):
        def visit_ImportFrom(self, node):
            if id(node) not in top: found.append(node)
        def visit_Import(self, node):
            if id(node) not in top: found.append(node)
    source.wrapper.module.visit(Find())
    for node in found:
        lines, touched = [], False
        scope = scopes[node]
        for bound, target, has_as in aliases(node):
            new = new_target(target)
            mod = is_module(target) or (target.name is None and target.module in old_modules)
            full = f"{target.module}.{target.name}" if target.name else target.module
            refs = [a.node for each in scope[bound.split(".")[0]] if isinstance(each, ImportAssignment) and each.node is node for a in each.references]
            inside = group is not None and (NEW_OF[full] == group if mod else target.module in moved and NEW_OF[target.module] == group)
            if mod:
                local = bound if has_as else (new.name or new.module)
                touched |= inside or new != target
                for ref in refs:
                    parent = parents.get(ref)
                    if isinstance(ref, cst.Attribute) or (target.name is None and not has_as):
                        if new != target: problem(f"{source.name}: lazy import {full}: {dotted(parent)[:60]}")
                        continue
                    if isinstance(parent, cst.Attribute) and parent.value is ref:
                        attr_new = final.get((full, parent.attr.value), parent.attr.value)
                        table[parent] = cst.Name(attr_new) if inside else parent.with_changes(value=cst.Name(local), attr=cst.Name(attr_new))
                    elif inside: problem(f"{source.name}: lazy module {full} used as a value")
                    else: put_name(table, ref, bound, local)
                if not inside: lines.append(import_lines(new, local))
            elif target.module in moved:
                touched = True
                if inside:
                    for ref in refs: put_name(table, ref, bound, new.name)
                    continue
                local = bound if has_as else new.name
                for ref in refs: put_name(table, ref, bound, local)
                lines.append(import_lines(new, local))
            else:
                lines.append(import_lines(target, bound))
        if not touched: continue
        line = parents[node]
        if len(line.body) != 1:
            problem(f"{source.name}: lazy import shares its line"); continue
        if not lines:
            block = parents[line]
            if isinstance(block, (cst.IndentedBlock, cst.Module)) and len(block.body) > 1: drop.add(line)
            else: table[line] = cst.parse_statement("pass")
        else:
            smalls = [cst.parse_statement(text).body[0] for text in dict.fromkeys(lines)]
            trailing = line.trailing_whitespace
            class Many: pass
            table[line] = cst.FlattenSentinel([cst.SimpleStatementLine([small], leading_lines=line.leading_lines if k == 0 else [], trailing_whitespace=trailing if k == 0 else cst.TrailingWhitespace()) for k, small in enumerate(smalls)])
    return drop

def top_import_drops(source):
    drop = set()
    for line in source.wrapper.module.body:
        if isinstance(line, cst.SimpleStatementLine) and all(isinstance(s, (cst.Import, cst.ImportFrom)) for s in line.body):
            drop.add(line)
            comment = line.trailing_whitespace.comment
            if comment: problem(f"{source.name}: comment behind an import: {comment.value}")
        elif is_types_if(line):
            drop.add(line)
            if line.orelse or not all(isinstance(l, cst.SimpleStatementLine) and all(isinstance(s, (cst.Import, cst.ImportFrom)) for s in l.body) for l in line.body.body):
                problem(f"{source.name}: TYPE_CHECKING block holds more than imports")
    return drop

def docstring_line(module):
    if module.body and isinstance(module.body[0], cst.SimpleStatementLine) and isinstance(module.body[0].body[0], cst.Expr) and isinstance(module.body[0].body[0].value, (cst.SimpleString, cst.ConcatenatedString)):
        return module.body[0]
    return None

DOTTED = re.compile(r"\bgpurun(?:\.\w+)+")
def new_dotted(match):
    words = match.group().split(".")
    for cut in range(len(words), 1, -1):
        key = ".".join(words[:cut])
        if key in NEW_OF:
            rest = words[cut:]
            if rest and (key, rest[0]) in final: rest = [final[key, rest[0]], *rest[1:]]
            return ".".join([NEW_OF[key], *rest])
    return match.group()

IMPORTS = re.compile(r"\s*(from|import)\s")
def text_dotted(text):
    """Names of modules in strings and comments; import statements have been rewritten before."""
    return "".join(line if IMPORTS.match(line) else DOTTED.sub(new_dotted, line) for line in text.splitlines(keepends=True))

def order_of(olds):
    """Topologically by imports at module level, otherwise as the map says."""
    done, out = set(), []
    def go(name):
        if name in done: return
        done.add(name)
        for other in olds:
            if other in old_modules[name].top: go(other)
        out.append(name)
    for name in olds: go(name)
    return out

def render_imports(kept_all):
    plain, typed = [], []
    for local, (target, types) in kept_all.items():
        (typed if types else plain).append(import_lines(target, local))
    text = "\n".join(sorted(plain))
    if typed:
        if "from typing import TYPE_CHECKING" not in text: text += "\nfrom typing import TYPE_CHECKING"
        text += "\n\nif TYPE_CHECKING:\n" + "\n".join("    " + line for line in sorted(typed))
    return text

# ---- merging ------------------------------------------------------------------------------------------------------------
written: dict[Path, str] = {}
for new in sorted(changed):
    olds = order_of(ORDER[new])
    leaf = new.rpartition(".")[2]
    names = set()
    for old in olds: names |= {final.get((old, n), n) for n in sources[old].defs}
    kept_all, bodies, docs = {}, [], {}
    for old in olds:
        source = sources[old]
        table, kept = plan_source(source, new, names)
        for local, (target, types) in list(kept.items()):
            clash = (local in kept_all and kept_all[local][0] != target) or local in names
            if clash:
                other = f"{target.module.rpartition('.')[2]}_{local}"
                problem(f"{new}: import {local} ({target.module}) of {old} clashes; now {other}")
                for bound, binding in source.imports.items():
                    if new_target(binding.target) == target:
                        for each in source.scope.assignments:
                            if each.name == bound:
                                for access in each.references:
                                    ref = access.node
                                    if ref in table and isinstance(table[ref], cst.Name): table[ref] = cst.Name(other)
                                    elif isinstance(ref, cst.Name):
                                        parents = source.wrapper.resolve(ParentNodeProvider)
                                        parent = parents.get(ref)
                                        if parent in table and isinstance(table[parent], cst.Attribute): table[parent] = table[parent].with_changes(value=cst.Name(other))
                                        else: table[ref] = cst.Name(other)
                del kept[local]; kept[other] = (target, types); local = other
            kept_all[local] = (target, types and kept_all.get(local, (0, True))[1])
        drop = top_import_drops(source) | lazy_imports(source, new, table) | set(EQUAL_LINES[old])
        doc = docstring_line(source.wrapper.module)
        if doc is not None:
            docs[old] = doc.body[0].value.evaluated_value
            drop.add(doc)
        out = source.wrapper.module.visit(Rewrite(table, drop, {}))
        bodies.append((old, out.code.strip("\n")))
        if re.search(r"\b__file__\b|__name__", out.code): problem(f"{new}: {old} uses __file__ or __name__")
    main = next((old for old in olds if old.rpartition(".")[2] == leaf), olds[-1])
    head = DOCS.get(new) or (docs.get(main) or docs.get(olds[0]) or "").strip()
    text = f'"""{head}' + ('"""' if "\n" not in head else '\n"""') + "\n\nfrom __future__ import annotations\n\n"
    text += render_imports(kept_all) + "\n\n"
    for old, body in bodies:
        if not body: continue
        if old != main and docs.get(old):
            first = docs[old].strip()
            text += "\n\n" + "\n".join(textwrap.wrap(" ".join(first.split("\n\n")[0].split()), 118, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False)) + "\n\n"
        text += "\n\n" + body + "\n"
    base = TREE / new.replace(".", "/")
    keeps_package = any(n.startswith(new + ".") for n in ORDER)
    written[base / "__init__.py" if keeps_package else base.with_suffix(".py")] = text_dotted(text)

for old in moved: old_modules[old].path.unlink()
for path, text in written.items():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

# ---- importers ------------------------------------------------------------------------------------------------------------
files = [p for room in ("gpurun", "tests", "benchmarks", ".ci", "recipes") for p in (TREE / room).rglob("*.py") if "__pycache__" not in p.parts]
count = 0
for path in files:
    if path in written: continue
    text = path.read_text()
    if "gpurun" not in text: continue
    probe = __import__("tree").Module(str(path), path, text, __import__("ast").parse(text))
    __import__("tree").edges(probe, old_modules)
    if not any(NEW_OF[t] != t or t in moved for t in probe.top | probe.lazy | probe.types):
        if text_dotted(text) != text: path.write_text(text_dotted(text)); count += 1
        continue
    source = read(path, str(path.relative_to(TREE)))
    if source.scope is None: continue
    touched = any(is_module(b.target) and NEW_OF[f"{b.target.module}.{b.target.name}"] != f"{b.target.module}.{b.target.name}" or b.target.module in moved or NEW_OF.get(b.target.module, b.target.module) != b.target.module for b in source.imports.values())
    table, kept = plan_source(source, None, set()) if touched else ({}, {})
    drop = lazy_imports(source, None, table)
    if touched:
        local_names = set(source.defs)
        for local in kept:
            if local in local_names and local not in source.imports: problem(f"{source.name}: {local} is both an import and a definition")
        nodes = []
        for node, types in top_imports(source.wrapper.module):
            lines = []
            for bound, target, has_as in aliases(node):
                if target.module == "__future__": lines = None; break
                new = new_target(target)
                if (source.name, bound) in DIRECT: continue
                if target.name is None:
                    lines.append(import_lines(new, bound if has_as else new.module)); continue
                local = bound if has_as or (source.name, bound) in ALIASED else new.name
                lines.append(import_lines(new, local))
            if lines is None: continue
            lines += EXTRA.get(id(node), [])
            if new_lines_equal := [import_lines(t, b) if t.name else None for b, t, _ in aliases(node)] == lines: continue
            line = source.wrapper.resolve(ParentNodeProvider)[node]
            smalls = [cst.parse_statement(each).body[0] for each in dict.fromkeys(lines)]
            table[line] = cst.FlattenSentinel([cst.SimpleStatementLine([small], leading_lines=line.leading_lines if k == 0 else [], trailing_whitespace=line.trailing_whitespace if k == 0 else cst.TrailingWhitespace()) for k, small in enumerate(smalls)])
    code = source.wrapper.module.visit(Rewrite(table, drop, {})).code if (table or drop) else text
    code = text_dotted(code)
    if code != text: path.write_text(code); count += 1
for other in [TREE / "pyproject.toml", TREE / "Makefile", *TREE.glob("docs/*.md"), *TREE.glob(".ci/*"), *TREE.glob("tests/**/*.toml"), *TREE.glob("tests/**/*.json"), *TREE.glob("gpurun/**/*.pyi")]:
    if other.is_file() and other.suffix != ".py":
        text = other.read_text()
        if text_dotted(text) != text: other.write_text(text_dotted(text))
for package in sorted({p.parent for p in written}, key=lambda p: len(p.parts)):
    init = package / "__init__.py"
    if not init.exists():
        name = name_of(init, TREE)
        init.write_text(f'"""{DOCS.get(name, name)}"""\n')
for folder in sorted((TREE / "gpurun").rglob("*"), key=lambda p: -len(p.parts)):
    if folder.is_dir() and folder.name != "__pycache__":
        rest = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        if not rest or [p.name for p in rest] == ["__init__.py"] and name_of(folder / "__init__.py", TREE) not in {n for n in ORDER}:
            import shutil; shutil.rmtree(folder)
print(f"{len(moved)} modules into {len(changed)}; {count} importers rewritten; {len(PROBLEMS)} places for a person:")
for each in PROBLEMS: print("  ", each)
