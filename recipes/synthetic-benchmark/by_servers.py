"""TensorFlow's parameter servers: workers take weights from servers and give gradients back, each at its own pace."""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from itertools import pairwise

import choices
import measures
import models
import tf_network  # first: it sets what TensorFlow reads when it is imported

import tensorflow as tf  # isort: skip

ALONE_STEPS = 5
MOVES = 3
LEAST_PART_BYTES = 64 << 10


class Chief:
    """Hands out steps, and times them by each worker's own clock."""

    def __init__(self, arguments: argparse.Namespace, resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
        self.arguments, self.gradient_bytes = arguments, 0
        self.workers = resolver.cluster_spec().num_tasks("worker")
        # Without this a layer lies on one server, and that of VGG's first dense layer has 3 of 4 bytes.
        parts = tf.distribute.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=LEAST_PART_BYTES, max_shards=resolver.cluster_spec().num_tasks("ps")
        )
        self.strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=parts)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            self.net = tf_network.network(arguments)
        self.batches = iter(self.coordinator.create_per_worker_dataset(tf.function(self._batches)))

    def _batches(self, _context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """A worker's number and its one batch, again and again."""
        number = tf.random.uniform((), maxval=1 << 62, dtype=tf.int64)
        return tf.data.Dataset.from_tensors((number, *tf_network.synthetic(self.arguments))).repeat()

    @tf.function
    def step(self, batches: tf.data.Iterator) -> tuple[tf.Tensor, tf.Tensor]:
        """One step of one worker; returns its number, and its clock at the end."""

        def on_worker(pixels: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
            found = tf_network.gradients(self.net, pixels, classes)
            self.gradient_bytes = tf_network.gradient_bytes(found)  # when it is traced
            tf_network.apply(self.net, found)
            return tf.timestamp()

        number, *batch = next(batches)
        return number, self.strategy.run(on_worker, args=batch)

    @tf.function
    def pull(self, batches: tf.data.Iterator) -> tuple[tf.Tensor, tf.Tensor]:
        """Take all weights, without a step."""
        sums = self.strategy.run(lambda: tf.add_n([tf.reduce_sum(variable) for variable in self.net.trained]))
        return next(batches)[0], sums

    @tf.function
    def exchange(self, batches: tf.data.Iterator) -> tuple[tf.Tensor, tf.Tensor]:
        """Take all weights, and give them back as gradients: what moves in a step, without its computing.

        Gradients that TensorFlow can compute without the worker, such as a constant, would not move.
        """

        def on_worker() -> tf.Tensor:
            tf_network.apply(self.net, [tf.identity(variable) for variable in self.net.trained])
            return tf.timestamp()

        number = next(batches)[0]
        return number, self.strategy.run(on_worker)

    def move_s(self, work) -> float:
        """Seconds until all workers, at once, have done `work`; each does it once, so none does another's share."""
        return measures.median_s(lambda: self.run(work, 1), MOVES)

    def take_first_step(self) -> None:
        """Take one step alone: in 1 of 50 starts, TensorFlow 2.15 crashed when all first results came at once."""
        self.coordinator.schedule(self.step, args=(self.batches,)).fetch()

    def run(self, work, count: int) -> list[tuple[int, float]]:
        """Have workers do `work`, `count` times each on average; what they return."""
        results = [self.coordinator.schedule(work, args=(self.batches,)) for _ in range(count * self.workers)]
        found = []
        for number, result in enumerate(results):
            worker, value = result.fetch()
            found.append((int(worker), float(value)))
            if measures.gpurun:
                measures.gpurun.progress(number, of=len(results))
        return found


def rates(ends: list[tuple[int, float]], warmup: int) -> dict[int, list[float]]:
    """Seconds of each step by worker, from when its steps ended, the warm-up dropped."""
    by_worker: dict[int, list[float]] = {}
    for worker, at in ends:
        by_worker.setdefault(worker, []).append(at)
    times = {}
    for worker, found in by_worker.items():
        kept = sorted(found)[max(0, warmup - 1) :]
        times[worker] = [later - earlier for earlier, later in pairwise(kept)]
    return {worker: steps for worker, steps in times.items() if steps}


def serve(arguments: argparse.Namespace, resolver: tf.distribute.cluster_resolver.ClusterResolver) -> int:
    """Be a server or a worker until gpurun ends it; a worker first measures how long it computes alone."""
    rank = str(measures.gpurun.gang().rank) if measures.gpurun else f"{resolver.task_type}-{resolver.task_id}"
    tf_network.use_threads(arguments.threads)
    if resolver.task_type == "worker":
        alone = tf_network.Alone(arguments)
        compute_s = measures.median_s(alone.step, ALONE_STEPS)
        items = models.items(arguments.model, arguments.batch, arguments.sequence)
        measures.tell(0, compute_s=compute_s, batch=items)
        measures.write(measures.outputs_folder(), rank, {"role": "worker", "compute_s": compute_s})
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    del server  # it continues to serve
    while True:
        time.sleep(3600)


def settled(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments with all choices made. Servers apply gradients as they come: batches stay those of 2017."""
    if arguments.seconds:
        raise SystemExit("--seconds: with parameter servers, each worker takes its own number of steps; use --steps")
    found = choices.settle(arguments, tf_network.card())
    found.batch = models.BATCH.get(found.model, 64) if found.batch is None else found.batch
    tf_network.use(found)
    return found


def run(arguments: argparse.Namespace) -> int:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    arguments = settled(arguments)
    if resolver.task_type != "chief":
        return serve(arguments, resolver)
    chief = Chief(arguments, resolver)
    chief.take_first_step()
    items, unit = models.items(arguments.model, arguments.batch, arguments.sequence), models.unit(arguments.model)
    seen = measures.watch_bytes()
    began = time.time()
    times = rates(chief.run(chief.step, arguments.warmup + arguments.steps), arguments.warmup)
    ended = time.time()
    medians = {worker: statistics.median(steps) for worker, steps in times.items()}
    total = sum(items / step_s for step_s in medians.values())
    pull_s, exchange_s = chief.move_s(chief.pull), chief.move_s(chief.exchange)
    inside = [counters for at, counters in seen if began <= at <= ended]
    sent = measures.sent_bytes(inside[0], inside[-1]) / (arguments.warmup + arguments.steps) if inside else None
    size = chief.gradient_bytes
    shortest = min(len(steps) for steps in times.values())
    for number in range(shortest):
        rate = sum(items / steps[number] for steps in times.values())
        measures.tell(arguments.warmup + number, **{f"{unit}_per_s": rate})
    step_s = statistics.median(medians.values())
    measures.tell(
        arguments.warmup + arguments.steps, step_s=step_s, exchange_s=exchange_s, pull_s=pull_s,
        fabric_bytes=sent, gradient_bytes=size, batch=items, **measures.way_of_training(arguments),
    )  # fmt: skip
    measures.write(measures.outputs_folder(), "chief", {
        "size": chief.workers, "way": "servers", **measures.settings(arguments),
        "servers": resolver.cluster_spec().num_tasks("ps"), "gradient_bytes": size, f"{unit}_per_s_all": total,
        f"{unit}_per_s": [items / value for value in medians.values()], "step_s": step_s,
        "step_s_spread": measures.spread([took for steps in times.values() for took in steps]),
        "pull_s": pull_s, "exchange_s": exchange_s, "fabric_bytes": sent,
        "steps_s": list(times.values()),
        "versions": {"tensorflow": tf.__version__},
    })  # fmt: skip
    return 0
