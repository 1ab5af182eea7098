"""The modules of a tree: files, sizes, imports (at module level, lazy, for types)."""
from __future__ import annotations
import ast, sys
from dataclasses import dataclass, field
from pathlib import Path

@dataclass
class Module:
    name: str
    path: Path
    text: str
    tree: ast.Module
    top: set[str] = field(default_factory=set)   # modules imported at module level
    lazy: set[str] = field(default_factory=set)  # inside of functions
    types: set[str] = field(default_factory=set) # under TYPE_CHECKING
    @property
    def lines(self): return self.text.count("\n")

def name_of(path, top):
    parts = list(path.relative_to(top).with_suffix("").parts)
    if parts[-1] == "__init__": parts.pop()
    return ".".join(parts)

def load(top: Path, package="gpurun"):
    found = {}
    for path in sorted((top / package).rglob("*.py")):
        if "__pycache__" in path.parts: continue
        text = path.read_text()
        found[name_of(path, top)] = Module(name_of(path, top), path, text, ast.parse(text))
    for module in found.values(): edges(module, found)
    return found

def targets(node, names):
    if isinstance(node, ast.Import):
        return {a.name for a in node.names if a.name in names}
    out = set()
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        for a in node.names:
            full = f"{node.module}.{a.name}"
            if full in names: out.add(full)
            elif node.module in names: out.add(node.module)
    return out

def edges(module, names):
    def walk(node, kind):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                getattr(module, kind).update(targets(child, names) - {module.name})
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for each in child.body: walk_one(each, "types")
                for each in child.orelse: walk_one(each, kind)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                walk(child, "lazy" if kind == "top" else kind)
            else: walk(child, kind)
    def walk_one(node, kind):
        if isinstance(node, (ast.Import, ast.ImportFrom)): getattr(module, kind).update(targets(node, names) - {module.name})
        else: walk(node, kind)
    walk(module.tree, "top")
    module.lazy -= module.top; module.types -= module.top | module.lazy

if __name__ == "__main__":
    m = load(Path(sys.argv[1]))
    rooms = {}
    for name, mod in m.items():
        p = name.split("."); room = ".".join(p[:2] if len(p) < 4 and p[1] != "node" else p[:3]) if len(p) > 1 else name
        rooms.setdefault(room, []).append(mod)
    for room, mods in sorted(rooms.items()):
        print(f"\n## {room}: {len(mods)} files, {sum(x.lines for x in mods)} lines")
        for x in sorted(mods, key=lambda x: x.name):
            own = sorted(t.split(".")[-1] for t in x.top if any(t == y.name for y in mods))
            print(f"  {x.name.removeprefix(room+'.')} {x.lines}" + (f"  <- {' '.join(own)}" if own else "") + (f"  lazy: {' '.join(sorted(x.lazy))}" if x.lazy else ""))
