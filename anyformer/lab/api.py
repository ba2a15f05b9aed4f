"""Names of grids, and their comparison that are stable."""

from anyformer.lab.compare import cells as cells, compare as compare, markdown as markdown
from anyformer.lab.grid import Axis as Axis, Grid as Grid, Steps as Steps, run_grid as run_grid
