"""The exceptions that a user of sanctuary_trainer can meet.

    SanctuaryError
      SettingsError      (ValueError)           a setting is wrong, or two settings contradict each other
      TaskError          (RuntimeError)         the task's code returned or built something that cannot be used
      DataError          (RuntimeError)         a loader, a batch or a prediction has a shape that cannot be used
      CallbackError      (TypeError)            a callback is misspelt, unknown or given twice
      RunFolderError     (RuntimeError)         the run folder cannot be used
      CheckpointError    (RuntimeError)         a checkpoint is missing, broken, or of another task
      RankError          (RuntimeError)         another rank failed; its own text is in the message
      NotSupportedError  (NotImplementedError)  a combination that this version refuses
      OutOfMemoryError   (RuntimeError)         one sample, or the optimizer's step, does not fit into memory

Every message says what happened with the value that was met, what was expected, and what to do.
"""


class SanctuaryError(Exception):
    """Catches everything that this package raises on purpose."""


class SettingsError(SanctuaryError, ValueError):
    """A setting is wrong, or two settings contradict each other."""


class TaskError(SanctuaryError, RuntimeError):
    """The task's code returned or built something that cannot be used."""


class DataError(SanctuaryError, RuntimeError):
    """A loader, a batch or a prediction has a shape that cannot be used."""


class CallbackError(SanctuaryError, TypeError):
    """A callback is misspelt, unknown or given twice."""


class RunFolderError(SanctuaryError, RuntimeError):
    """The run folder cannot be used."""


class CheckpointError(SanctuaryError, RuntimeError):
    """A checkpoint is missing, broken, or of another task; or it could not be written."""


class RankError(SanctuaryError, RuntimeError):
    """Another rank failed; its own text is in the message."""


class NotSupportedError(SanctuaryError, NotImplementedError):
    """A combination that this version refuses."""


class OutOfMemoryError(SanctuaryError, RuntimeError):
    """One sample, or the optimizer's step, does not fit into memory."""
