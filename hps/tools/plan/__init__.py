"""Capacity planner: from a key trace to the smallest caches that meet a target (``hps plan``).

`TraceCollector` reduces a trace to a sample of its keys, `TableCurve` computes hit rates by capacity,
`calibrate` measures latencies, and `Planner` chooses. Sources: Waldspurger et al., Efficient MRC construction
with SHARDS, FAST 2015; Waldspurger et al., Cache modeling and optimization using miniature simulations,
USENIX ATC 2017."""
