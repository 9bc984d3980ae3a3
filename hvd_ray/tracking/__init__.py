"""Runs, figures, artifacts and registered predictors in MLflow, which is imported only here.

By default everything goes into a SQLite file under HVD_HOME; `tracking.uri` names another store
(as MLFLOW_TRACKING_URI does), and `tracking.uri=none` turns tracking off. Nothing is sent anywhere
else. A store that cannot be used is one clear line (`UserError`), never a traceback.
"""

from hvd_ray.tracking.registry import (
    CHALLENGER,
    CHAMPION,
    RegisteredPredictor,
    register_predictor,
    registered_name,
    resolve_predictor,
)
from hvd_ray.tracking.runs import MlflowTracker, NullTracker, Tracker, open_tracker, tracked
from hvd_ray.tracking.store import (
    OFF,
    artifact_location,
    prepare_store,
    runs_page,
    tracking_uri,
)

__all__ = [
    "CHALLENGER",
    "CHAMPION",
    "OFF",
    "MlflowTracker",
    "NullTracker",
    "RegisteredPredictor",
    "Tracker",
    "artifact_location",
    "open_tracker",
    "prepare_store",
    "register_predictor",
    "registered_name",
    "resolve_predictor",
    "runs_page",
    "tracked",
    "tracking_uri",
]
