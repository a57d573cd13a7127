"""The training job: settings in, an ordinary Hugging Face model directory out."""
