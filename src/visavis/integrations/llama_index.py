"""VisavisIndexRetriever and VisavisEmbedding: an index as a retriever of LlamaIndex, and a model as
its embedding of texts and images.

``VisavisIndexRetriever("indexes/photos").retrieve("two dogs on a beach")``
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from visavis.core.errors import requires_extra
from visavis.data.images import decode_image
from visavis.models.retriever import Retriever
from visavis.retrieval.items import NO_FILTER, ItemFilter
from visavis.retrieval.open_index import SharedIndex
from visavis.retrieval.search import SearchQuery, parse_query

with requires_extra("llama-index", "visavis.integrations.llama_index"):
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.embeddings import MultiModalEmbedding
    from llama_index.core.schema import ImageNode, NodeWithScore, QueryBundle, TextNode


class VisavisIndexRetriever(BaseRetriever):
    """Retriever over an index. Images are nodes of class ImageNode, clips and moments of class
    TextNode.

    The text of a node is the first caption of its item, else the name of the file. Its metadata are
    the values of ``visavis search --json``, except the score, which ``NodeWithScore`` has. Its id is the
    key of the item. A query may have an image: ``QueryBundle("", image_path="photo.jpg")``.

    Args:
        index: Folder of the index. It is opened at once.
        similarity_top_k: Number of nodes.
        item_filter: Conditions on the items.
        store: Confirms the store of an index outside its folder.
        options: Further options of BaseRetriever, such as ``callback_manager``.

    Raises:
        RunError: If the folder is not an index, or its model or store cannot be opened.
    """

    def __init__(
        self,
        index: str | Path,
        *,
        similarity_top_k: int = 5,
        item_filter: ItemFilter = NO_FILTER,
        store: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.similarity_top_k = similarity_top_k
        self.item_filter = item_filter
        self._opened = SharedIndex(index, store)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        text = query_bundle.query_str
        image = query_bundle.image_path
        # A query with an image needs no text.
        texts = parse_query(text) or (() if image else ((1.0, text),))
        query = SearchQuery(texts, images=((1.0, image),) if image else ())
        results = self._opened.search(query, self.similarity_top_k, self.item_filter)
        nodes = []
        for result in results:
            metadata = {name: value for name, value in result.to_json().items() if name != "score"}
            node: dict[str, Any] = {
                "id_": result.key,
                "text": result.item.text,
                # Language models get the text and the name, and the image of an ImageNode.
                "metadata": metadata,
                "excluded_embed_metadata_keys": list(metadata),
                "excluded_llm_metadata_keys": [name for name in metadata if name != "name"],
            }
            location = None if result.image is None else result.image.location
            # LlamaIndex reads whole files, not parts of archives.
            if result.item.kind == "image" and location is not None and location.size is None:
                content: TextNode = ImageNode(image_path=str(location.path), **node)
            else:
                content = TextNode(**node)
            nodes.append(NodeWithScore(node=content, score=result.score))
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


class VisavisEmbedding(MultiModalEmbedding):
    """Embedding of texts and images by a model with one vector per item. The vectors have length 1.

    Args:
        model_name: Run folder, or folder or hub name of a pretrained model.
        options: Further options of BaseEmbedding, such as ``embed_batch_size``.

    Raises:
        RunError: If the model cannot be opened.
    """

    _model: Retriever = PrivateAttr()

    def __init__(self, model_name: str, **options: Any) -> None:
        super().__init__(model_name=str(model_name), **options)
        self._model = Retriever.load(model_name)

    @classmethod
    def class_name(cls) -> str:
        """Return the name in serialized objects."""
        return "VisavisEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._model.encode_texts(texts).tolist() if texts else []

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    def _get_image_embeddings(self, img_file_paths: list[Any]) -> list[list[float]]:
        images = [
            decode_image(image.getvalue(), "image") if isinstance(image, BytesIO) else image
            for image in img_file_paths
        ]
        return self._model.encode_images(images).tolist() if images else []

    def _get_image_embedding(self, img_file_path: Any) -> list[float]:
        return self._get_image_embeddings([img_file_path])[0]

    # In threads, because a model would block the event loop.
    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_image_embeddings(self, img_file_paths: list[Any]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_image_embeddings, img_file_paths)

    async def _aget_image_embedding(self, img_file_path: Any) -> list[float]:
        return await asyncio.to_thread(self._get_image_embedding, img_file_path)
