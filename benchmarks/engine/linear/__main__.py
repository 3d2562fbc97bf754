"""Finds the fastest way to multiply, per shape and number of rows, and writes the table that kernels/tuning.py
reads: for weights in bf16 by few rows, and for the same in 12 bits a number by any.

    python -m benchmarks.engine.linear --write                  every shape, on the GPU at hand
    python -m benchmarks.engine.linear --only bf12 --models llama-3.1-8b --rows 1,8

First each way is measured alone (alone.py). Then the ways for a decode step compete in their model's whole chain of
matmuls and norms (chain.py), whose winners the table gets; the ratio to bf16 stays that of a matrix alone.

Each time is printed beside the bound, max(bytes of the weight ÷ 4.3 TB/s, FLOP ÷ 790 T), and the best of each kernel.
"""

import argparse
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

from benchmarks.engine.linear import alone
from benchmarks.engine.linear.alone import GPU, compile_all, done, measure
from benchmarks.engine.linear.chain import DeviceLostError, tune
from benchmarks.engine.linear.shapes import MODELS, storages_of, works_of
from benchmarks.engine.linear.table import Found
from engine.kernels.tuning import device_name
from engine.kernels.tuning_tables import table_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="whose shapes (default: all)")
    parser.add_argument("--rows", help="buckets (default: all)")
    parser.add_argument("--only", choices=("bf16", "bf12"), help="one storage (default: both, bf16 first)")
    parser.add_argument(
        "--write", action="store_true", help="put what is found into the table of this GPU, and record it"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once (default: one per core)")
    parser.add_argument(
        "--chain-seconds", type=float, default=55, help="for each model's chains in each storage, 0: none (default: 55)"
    )
    options = parser.parse_args()
    rows = None if options.rows is None else [int(rows) for rows in options.rows.split(",")]
    models = options.models.split(",")
    works = works_of(models, rows, options.only)
    # Processes find all that they run in the module that is loaded before they are made, and load nothing themselves.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([alone.__name__])
    with processes.Pool(options.processes) as pool:
        compile_all(works, pool, options.processes)
    findings, results = Found(table_path(device_name(GPU)), options.write), {}
    # A process for each work: where a kernel goes astray, no other is lost.
    with NamedTemporaryFile() as lock, processes.Pool(options.processes, maxtasksperchild=1) as pool:
        for measured in done(pool, partial(measure, lock=Path(lock.name)), works):
            results[measured.work] = measured
            findings.add(measured)
    if options.chain_seconds:
        try:
            for is_coded in storages_of(options.only):
                for name in models:
                    tune(name, is_coded, results, options.chain_seconds, findings)
        except DeviceLostError as error:
            print(f"{error.__cause__!r}: what was found until now is kept.", file=sys.stderr)


if __name__ == "__main__":
    main()
