"""The operations a model is made of: plain PyTorch as the meaning, C and Triton as the speed."""
