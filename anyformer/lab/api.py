"""Names of grids, their comparison, and experiments that are stable."""

from anyformer.lab.alone import alone as alone
from anyformer.lab.cells import Cell as Cell, CellResult as CellResult
from anyformer.lab.compare import cells as cells, compare as compare, markdown as markdown
from anyformer.lab.decision import (
    Fact as Fact,
    More as More,
    Side as Side,
    Verdict as Verdict,
    decide as decide,
    outcomes_of as outcomes_of,
)
from anyformer.lab.experiment import Experiment as Experiment, Rows as Rows, Size as Size
from anyformer.lab.grid import Axis as Axis, Grid as Grid, Steps as Steps, run_grid as run_grid
from anyformer.lab.stats import (
    MeanDifference as MeanDifference,
    Power as Power,
    difference as difference,
    power as power,
    summary as summary,
    tabled_test as tabled_test,
    written_test as written_test,
)
from anyformer.lab.trial import Trial as Trial, scratch_folder as scratch_folder, trained as trained, trial as trial
