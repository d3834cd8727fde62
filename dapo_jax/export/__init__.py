"""Writing a policy as a Hugging Face model directory."""
