"""Some of the samples of a source, as a source."""

from typing import Callable, Sequence

from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.encoded import StoredSample
from deepspec.data.sources import CachedFeatures


class Documents(Sequence[Sample]):
    """Some documents, looked up when asked for."""

    def __init__(self, documents: Sequence[Sample], indices: Sequence[int]) -> None:
        self._documents, self._indices = documents, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return self._documents[self._indices[index]]


class Subset:
    """The samples of a store whose ids ``wanted`` accepts, in the store's order."""

    def __init__(self, source: CachedFeatures, wanted: Callable[[str], bool]) -> None:
        self._source = source
        self._indices = [index for index, info in enumerate(source.samples) if wanted(info.sample_id)]
        self.samples = [source.samples[index] for index in self._indices]
        self.documents: Sequence[Sample] = Documents(source.documents, self._indices)
        self.store = source.store

    def __len__(self) -> int:
        return len(self._indices)

    def get(self, indices: Sequence[int]) -> list[FeatureSample]:
        """As CachedFeatures.get."""
        return self._source.get([self._indices[index] for index in indices])

    def get_stored(self, indices: Sequence[int]) -> list[StoredSample]:
        """As CachedFeatures.get_stored."""
        return self._source.get_stored([self._indices[index] for index in indices])
