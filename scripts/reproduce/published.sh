# Sourced by the scripts of published rows (src/rlctl/plan/data/published_steps.yaml). It starts nothing itself.
#   DATA   OpenMathInstruct-2 as one parquet or JSONL file, with columns problem and expected_answer, e.g. after
#          hf download nvidia/OpenMathInstruct-2 --repo-type dataset --include 'data/train_1M-00000*' --local-dir omi2
#   RUNS   where runs are kept; complete ones are not run again
# Arguments go to rlctl: --dry-run plans and starts nothing. More than one node: call it inside a Slurm allocation.
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
: "${DATA:?set DATA to a file of OpenMathInstruct-2; see scripts/reproduce/published.sh}"
row=$(basename "$0" .sh)
runs=${RUNS:-runs/$row}
steps=30 # published: the mean of steps 22 to 29

# train BACKEND NODES MODEL [key=value ...]
train() {
  local backend=$1 nodes=$2 model=$3 launcher=local
  local folder=$runs/$backend
  shift 3
  [ "$nodes" -gt 1 ] && launcher=slurm
  case " ${arguments[*]} " in *" --dry-run"*) launcher=local ;; esac
  [ "$(wc -l <"$folder/metrics.jsonl" 2>/dev/null || echo 0)" -ge $steps ] && return
  .venv/bin/rlctl train grpo --model "$model" --backend "$backend" --launcher $launcher --nodes "$nodes" \
    --gpus-per-node 8 --run-dir "$folder" cluster.gpu_kind=h100 \
    data.train_path="$DATA" data.input_key=problem data.output_key=expected_answer env.name=math \
    grpo.num_prompts_per_step=64 grpo.num_generations_per_prompt=32 policy.train_global_batch_size=512 \
    grpo.max_num_steps=$steps loss_fn.reference_policy_kl_penalty=0.01 policy.precision=bfloat16 \
    policy.train_micro_batch_size=1 policy.optimizer.lr=3e-7 checkpointing.enabled=false checkpointing.save_hf=false \
    "$@" "${arguments[@]}"
}

# the table: published, predicted and measured seconds by phase
compare() {
  case " ${arguments[*]} " in *" --dry-run"*) return ;; esac
  .venv/bin/python scripts/reproduce/published_steps.py "$row" "$runs"
}
arguments=("$@")
