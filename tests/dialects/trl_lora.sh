# a command line
trl sft \
  --model_name_or_path google/gemma-3-270m-it \
  --dataset_name data/train.jsonl \
  --use_peft --lora_r 32 --lora_alpha 16 \
  --lora_target_modules q_proj k_proj v_proj o_proj \
  --learning_rate 2e-4 --max_length=2048 \
  --lr_scheduler_type cosine --warmup_ratio 0.03 \
  --per-device-train-batch-size 4 --completion_only_loss True \
  --bf16 --seed 7 --output_dir out
