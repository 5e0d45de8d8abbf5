#!/usr/bin/env bash
# The script that every CI system in this folder runs.
#   measure     run pytest here, write to AISP_OUT; ends with 0 even if tests failed: CI keeps the files
#   gate DIR    one verdict of all runs in DIR; ends as pytest does: 0 green, 1 red, 17 invalid
#   history DIR  add all runs in DIR to the history on a branch of its own, and show it
#
# AISP_PAGES     arguments of pytest, separated by spaces (default: its own testpaths)
# AISP_OPTIONS   more options of pytest, separated by spaces
# AISP_OUT       folder of this run's artifacts (out)
# AISP_BASE      also compare with the merge base of this branch or commit
# AISP_PRODUCTS  products that must be measured, separated by commas
# AISP_COMMENT   also write the comment on the pull request to this file; comment.py posts it
# AISP_REPORT_ONLY  true: the gate ends with 0, whatever the verdict is
# AISP_HISTORY   branch of the history (aisp-history)
# AISP_REMOTE    remote or address that has this branch (origin)
set -euo pipefail

measure() {
    local out=${AISP_OUT:-out} code=0 words
    read -ra words <<< "${AISP_PAGES:-} ${AISP_OPTIONS:-}"
    words+=("--aisp-artifacts=$out" "--junitxml=$out/junit.xml")
    if [ -n "${AISP_BASE:-}" ]; then
        words+=("--aisp-against=$(git merge-base HEAD "$AISP_BASE")")
    fi
    if [ -e "$out/results.jsonl" ]; then # pytest that ends without a case would leave it to the gate
        rm -rf "${out:?}"
    fi
    python -m pytest "${words[@]}" || code=$?
    echo "pytest ended with $code" # the gate reads it from the run's manifest
}

gate() {
    local runs=("$1"/*/) code=0
    runs+=("--products=${AISP_PRODUCTS:-}")
    if [ "${AISP_REPORT_ONLY:-}" = true ]; then
        runs+=(--report-only)
    fi
    aisp ci gate "${runs[@]}" ${AISP_COMMENT:+"--comment=$AISP_COMMENT"} || code=$?
    if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
        aisp ci gate "${runs[@]}" --format=github || true
        aisp ci gate "${runs[@]}" --format=markdown >> "$GITHUB_STEP_SUMMARY" || true
    fi
    if [ -n "${GITLAB_CI:-}" ]; then
        aisp ci gate "${runs[@]}" --format=gitlab > gl-code-quality-report.json || true
    fi
    return "$code"
}

history() {
    local branch=${AISP_HISTORY:-aisp-history} remote=${AISP_REMOTE:-origin} tree run code=0 pushed=""
    for _ in 1 2 3; do # another pipeline may push first; a run is added only once
        tree=$(mktemp -d) code=0
        if git ls-remote --exit-code --heads "$remote" "$branch" > /dev/null; then
            git fetch --quiet --depth=1 "$remote" "$branch"
            git worktree add --quiet --detach "$tree" FETCH_HEAD
        elif [ $? -eq 2 ]; then # the remote answers, and has no such branch
            git worktree add --quiet --detach "$tree"
            git -C "$tree" checkout --quiet --orphan "new-$(basename "$tree")"
            git -C "$tree" rm -rfq .
        else
            return 1
        fi
        for run in "$1"/*/; do
            aisp results history "--add=$run" "$tree" || code=$?
        done
        git -C "$tree" add --all
        if git -C "$tree" diff --cached --quiet; then
            pushed=nothing
        else
            git -C "$tree" -c user.name=aisp -c user.email=aisp@localhost commit -qm "history: runs of ${CI_COMMIT_SHA:-${GITHUB_SHA:-HEAD}}"
            git -C "$tree" push --quiet "$remote" "HEAD:refs/heads/$branch" && pushed=yes
        fi
        if [ -n "$pushed" ]; then
            aisp results history "$tree" || code=$?
            git worktree remove --force "$tree"
            return "$code"
        fi
        git worktree remove --force "$tree"
    done
    echo "$0: the branch $branch could not be pushed" >&2
    return 1
}

case "${1:-}" in
measure) measure ;;
gate) gate "${2:?the folder with a folder for each run}" ;;
history) history "${2:?the folder with a folder for each run}" ;;
*)
    echo "$0 ${1:-}: legal are measure, gate DIR and history DIR" >&2
    exit 2
    ;;
esac
