"""Models on disk: GGUF files and Hugging Face folders, read without torch until a tensor is requested.

checkpoint = open_checkpoint(path)                       # BadCheckpoint says what is wrong with a file
checkpoint.config, checkpoint.fingerprint, checkpoint.names
checkpoint.weight("blk.0.attn_q.weight").affine()        # or .dense(), or .tensor(dtype, device)
"""
