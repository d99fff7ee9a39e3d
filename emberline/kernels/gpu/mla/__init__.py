"""Multi-head latent attention (MLA) on the GPU: absorbed for decode and short chunks, expanded for long ones."""
