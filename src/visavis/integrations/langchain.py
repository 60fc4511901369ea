"""VisavisRetriever and VisavisEmbeddings: an index as a retriever of LangChain, and a model as its
embeddings of texts and images.

``VisavisRetriever(index="indexes/photos", k=3).invoke("two dogs on a beach")``
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr

from visavis.core.errors import requires_extra
from visavis.models.retriever import Retriever
from visavis.retrieval.items import NO_FILTER, ItemFilter
from visavis.retrieval.open_index import SharedIndex
from visavis.retrieval.search import SearchQuery, parse_query

with requires_extra("langchain", "visavis.integrations.langchain"):
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever

if TYPE_CHECKING:
    from langchain_core.callbacks import (
        AsyncCallbackManagerForRetrieverRun,
        CallbackManagerForRetrieverRun,
    )


class VisavisRetriever(BaseRetriever):
    """Retriever over an index. The text of a document is the first caption of its item, else the
    name of the file.

    The metadata of a document are the values of ``visavis search --json``: ``key``, ``name``, ``path``,
    ``kind``, ``score``, ``match_probability``, ``duplicates`` and ``metadata``, and ``start`` and
    ``end`` of a moment. Its ``id`` is the key of the item.

    Args:
        index: Folder of the index. It is opened at once.
        store: Confirms the store of an index outside its folder.
        options: ``k``, ``item_filter``, and options of LangChain, such as ``tags``.

    Attributes:
        index: Folder of the index.
        k: Number of documents.
        item_filter: Conditions on the items.

    Raises:
        RunError: If the folder is not an index, or its model or store cannot be opened.
    """

    index: Path
    k: int = Field(5, ge=1)
    item_filter: ItemFilter = NO_FILTER
    _opened: SharedIndex = PrivateAttr()

    def __init__(
        self, index: str | Path, *, store: str | Path | None = None, **options: Any
    ) -> None:
        super().__init__(index=Path(index), **options)
        self._opened = SharedIndex(index, store)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        item_filter: ItemFilter | None = None,
    ) -> list[Document]:
        """Search the index. ``invoke`` passes ``k`` and ``item_filter`` for one call."""
        texts = SearchQuery(texts=parse_query(query) or ((1.0, query),))
        results = self._opened.search(
            texts,
            self.k if k is None else k,
            self.item_filter if item_filter is None else item_filter,
        )
        return [
            Document(result.item.text, id=result.key, metadata=result.to_json())
            for result in results
        ]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        """Search in a thread. The method of the base class does not pass options of one call."""
        return await asyncio.to_thread(
            self._get_relevant_documents, query, run_manager=run_manager.get_sync(), **options
        )


class VisavisEmbeddings(Embeddings):
    """Embeddings of texts and images by a model with one vector per item. They are unit vectors.

    Args:
        model: Run folder, folder or hub name of a pretrained model, or a loaded model.

    Raises:
        RunError: If the model cannot be opened.
    """

    def __init__(self, model: str | Path | Retriever) -> None:
        self.model = model if isinstance(model, Retriever) else Retriever.load(model)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed texts.

        Args:
            texts: The texts.

        Returns:
            One vector per text.
        """
        return self.model.encode_texts(texts).tolist() if texts else []

    def embed_query(self, text: str) -> list[float]:
        """Embed one text.

        Args:
            text: The text.

        Returns:
            The vector.
        """
        return self.embed_documents([text])[0]

    def embed_image(self, uris: Sequence[str | Path]) -> list[list[float]]:
        """Embed images. Vector stores of LangChain, such as Chroma, call this method.

        Args:
            uris: Paths of image files.

        Returns:
            One vector per image.
        """
        return self.model.encode_images(list(uris)).tolist() if uris else []
