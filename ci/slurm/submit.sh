#!/usr/bin/env bash
# Submits an array for each product, and the gate behind them; prints the gate's job id.
#   ci/slurm/submit.sh nvidia-h200:h200,nvidia-b200:b200 bench/ch01 bench/ch07
# A product is followed by the constraint that finds its nodes. The gate's log ends with the verdict.
set -euo pipefail

here=$(dirname "$0")
machines=$1
pages=("${@:2}")
jobs=() products=()
rm -rf runs
for machine in ${machines//,/ }; do
    products+=("${machine%%:*}")
    jobs+=("$(sbatch --parsable --array="0-$((${#pages[@]} - 1))" --constraint="${machine#*:}" \
        "$here/aisp.sbatch" "${machine%%:*}" "${pages[@]}")")
done
wanted=$(IFS=,; echo "${products[*]}")
after=$(IFS=:; echo "${jobs[*]}")
AISP_PRODUCTS=$wanted sbatch --parsable --dependency="afterany:$after" --job-name=aisp-gate \
    --output=aisp-gate-%j.log --export=ALL --wrap="ci/aisp.sh gate runs"
