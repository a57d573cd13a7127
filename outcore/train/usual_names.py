"""What settings that are usual elsewhere (transformers' TrainingArguments, TRL, PEFT) are here."""

from __future__ import annotations

USUAL_NAMES = {
    "model_name_or_path": "model",
    "output_dir": "output",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "tokens_per_step (sequences times seq_len) or micro_batch",
    "gradient_accumulation_steps": "tokens_per_step: of all sequences of a step",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "beta": "dpo_beta",
    "bf16": "dtype: bf16",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "save_steps": "save_every",
    "save_total_limit": "keep",
    "eval_steps": "eval_every",
    "logging_steps": "log_every",
    "resume_from_checkpoint": "resume",
}
