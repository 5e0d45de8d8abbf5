#!/usr/bin/env bash
# Measure on GPU 0 of this host in a container, on whole cores of the GPU's NUMA node.
#   AISP_IMAGE=your-repository CORES=0-7 NODE=0 ci/docker/measure.sh
# `aisp machine doctor` names the node and its CPUs, and says what to change on the host.
set -euo pipefail
options=(
    --rm
    --gpus device=0
    # Whole cores, not a share of all (--cpus): the system stops a process that used its share.
    # What the choice of cores changes: suites/ch03/affinity_test.py.
    --cpuset-cpus "${CORES:-0-7}"
    # Host memory of the same node: pinned buffers of another node are slower to copy:
    # suites/ch02/numa_test.py.
    --cpuset-mems "${NODE:-0}"
    # The default is 64 MiB, and ranks and loader workers share memory there, as those of
    # suites/ch13/dataloader_test.py do.
    --shm-size 8g
    # Pinned memory counts as locked: suites/ch01/h2d_test.py.
    --ulimit memlock=-1
    # Compilers recurse deeply.
    --ulimit stack=67108864
    -v "${AISP_OUT:-$PWD/out}:/out"
    -e AISP_OUT=/out
    -e AISP_PAGES
    -e AISP_OPTIONS
)
exec docker run "${options[@]}" "${AISP_IMAGE:-your-repository}"
