"""Other formats -> a version in the model repository, streamed.

``arrays`` is the common form of files that hold named arrays (npz, safetensors, PyTorch); ``plan`` says
which of them become which table; ``run`` writes the version.
"""

from hps.models.importers.import_model import import_model
from hps.models.importers.plan import ImportPlan, ImportTable, TableChoice
from hps.models.importers.sources import SOURCES, plan_import

__all__ = ["SOURCES", "ImportPlan", "ImportTable", "TableChoice", "import_model", "plan_import"]
