"""The weights of Hugging Face directories: safetensors files, hostile until checked."""
