"""Models on Apple silicon, through MLX and the model files of mlx-lm."""
