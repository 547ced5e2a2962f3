"""Models on Apple silicon, through MLX and the model files of mlx-lm."""

from quire.backends.support import import_mlx_lm

import_mlx_lm()  # before any module imports it
