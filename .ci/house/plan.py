"""plan.py TREE MAP.txt [--json OUT] [-v]: check a map of old modules to new ones: sizes, circles between files and packages."""
import json, statistics, sys
from tree import load
def read_map(path, modules):
    new_of, order, package = {}, {}, None
    for raw in open(path):
        line = raw.split("#")[0].strip()
        if not line or line[0] in "!=": continue
        if line.startswith("["): package = line.strip("[]"); continue
        name, _, olds = line.partition(":")
        new = f"{package}.{name.strip()}" if name.strip() != "." else package
        prefix = None
        for word in olds.split():
            if word.endswith("/"): prefix = word.rstrip("/"); continue
            tries = [f"{package}.{word}", f"{package.rpartition('.')[0]}.{word}", f"gpurun.{word}", package if word == package.split(".")[-1] else ""]
            if prefix: tries = [f"gpurun.{prefix}.{word}", f"{package}.{prefix}.{word}", *([f"gpurun.{prefix}", f"{package}.{prefix}"] if word == prefix.split(".")[-1] else []), *tries]
            old = next((each for each in tries if each in modules), word)
            if old not in modules: sys.exit(f"{new}: no module {word} ({old})")
            if old in new_of: sys.exit(f"{old} twice: {new_of[old]} and {new}")
            new_of[old] = new; order.setdefault(new, []).append(old)
    for old in modules:
        if old not in new_of: new_of[old] = old; order[old] = [old]
    return new_of, order
def sccs(graph):
    index, low, stack, on, out, count = {}, {}, [], set(), [], [0]
    sys.setrecursionlimit(10000)
    def go(v):
        index[v] = low[v] = count[0]; count[0] += 1; stack.append(v); on.add(v)
        for w in graph.get(v, ()):
            if w not in index: go(w); low[v] = min(low[v], low[w])
            elif w in on: low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            c = []
            while True:
                w = stack.pop(); on.discard(w); c.append(w)
                if w == v: break
            if len(c) > 1: out.append(c)
    for v in list(graph):
        if v not in index: go(v)
    return out
def package_of(n): 
    p = n.split("."); return ".".join(p[:2])
if __name__ == "__main__":
    modules = load(__import__("pathlib").Path(sys.argv[1]))
    new_of, order = read_map(sys.argv[2], modules)
    def graph(kinds, group):
        g, why = {}, {}
        for m in modules.values():
            for kind in kinds:
                for t in getattr(m, kind):
                    a, b = group(new_of[m.name]), group(new_of[t])
                    g.setdefault(a, set()); g.setdefault(b, set())
                    if a != b: g[a].add(b); why.setdefault((a, b), []).append(f"{m.name}->{t}")
        return g, why
    for label, kinds, group in (("files, at import", ("top",), str), ("files, all", ("top","lazy","types"), str), ("packages, at import", ("top",), package_of), ("packages, all", ("top","lazy","types"), package_of)):
        g, why = graph(kinds, group)
        found = sccs(g)
        print(f"circles between {label}: {len(found)}")
        for c in found:
            print("   ", *sorted(c)[:40])
            if "-v" in sys.argv and len(c) < 60:
                for (a, b), w in sorted(why.items(), key=lambda x: len(x[1])):
                    if a in c and b in c: print(f"        {a} -> {b}: {len(w)} {w[:4]}")
    sizes = {n: sum(modules[o].lines for o in olds) for n, olds in order.items()}
    files = [s for s in sizes.values()]
    real = [s for s in files if s > 20]
    print(f"files {len(files)} ({len(real)} above 20 lines), median {statistics.median(files)} (above 20: {statistics.median(real)}), above 950: {[(n,s) for n,s in sizes.items() if s>950]}, packages {len({package_of(n) for n in sizes if n.count('.')>1})}, top entries {len({package_of(n) for n in sizes if n!='gpurun'})}")
    if "-s" in sys.argv:
        for n, s in sorted(sizes.items()): print(f"{s:5} {n}  = {' '.join(o.removeprefix('gpurun.') for o in order[n])}")
    if "--json" in sys.argv: json.dump(order, open(sys.argv[sys.argv.index("--json")+1], "w"), indent=1)
