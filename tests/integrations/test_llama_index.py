"""VisavisIndexRetriever and VisavisEmbedding in LlamaIndex: the tests of its own integrations (base
classes, both ways of calling, serialization), and comparisons with ``visavis.search``.
"""

from __future__ import annotations

import asyncio
import copy
import io
import pickle
from pathlib import Path

import pytest
import torch

import visavis
from visavis.core.errors import RunError
from visavis.retrieval.items import ItemFilter

pytest.importorskip("llama_index.core", reason="LlamaIndex is installed by make slow")
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.embeddings import MultiModalEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import ImageNode, MetadataMode, QueryBundle, TextNode

from visavis.integrations.llama_index import VisavisEmbedding, VisavisIndexRetriever

pytestmark = pytest.mark.slow
QUERY = "a red circle"


@pytest.fixture(scope="module")
def embedding(dual_encoders):
    return VisavisEmbedding(str(dual_encoders / "clip"))


@pytest.fixture(scope="module")
def images(few_scenes):
    return [str(path) for path in sorted((few_scenes / "images").iterdir())[:3]]


def test_retriever_class():
    assert BaseRetriever.__name__ in [base.__name__ for base in VisavisIndexRetriever.__mro__]


def test_embedding_class():
    names = [base.__name__ for base in VisavisEmbedding.__mro__]
    assert {BaseEmbedding.__name__, MultiModalEmbedding.__name__} <= set(names)


def test_nodes_are_the_results_of_a_search(scene_index):
    nodes = VisavisIndexRetriever(scene_index, similarity_top_k=4).retrieve(QUERY)
    hits = visavis.search(scene_index, QUERY, top=4).to_json()["hits"]
    assert [(node.id_, node.score) for node in nodes] == [
        (hit["key"], hit["score"]) for hit in hits
    ]
    for node, hit in zip(nodes, hits, strict=True):
        assert isinstance(node.node, ImageNode)
        assert node.node.image_path == hit["path"]
        assert Path(node.node.image_path).is_file()
        assert node.text == hit["metadata"]["caption"]
        assert node.metadata == {name: hit[name] for name in hit if name != "score"}
        assert node.node.get_content(MetadataMode.LLM) == f"name: {hit['name']}\n\n{node.text}"
        assert node.node.get_content(MetadataMode.EMBED) == node.text


def test_retriever_is_the_same_in_both_ways(scene_index):
    retriever = VisavisIndexRetriever(scene_index)
    nodes = retriever.retrieve(QUERY)
    assert len(nodes) == 5
    assert asyncio.run(retriever.aretrieve(QueryBundle(QUERY))) == nodes


def test_retriever_takes_an_image(scene_index, images):
    retriever = VisavisIndexRetriever(scene_index, similarity_top_k=1)
    (node,) = retriever.retrieve(QueryBundle("", image_path=images[0]))
    assert node.node.image_path == images[0]
    assert node.score == pytest.approx(1.0, abs=1e-5)


def test_retriever_filters_items(scene_index):
    split = ItemFilter(metadata={"split": "val"})
    nodes = VisavisIndexRetriever(scene_index, item_filter=split).retrieve(QUERY)
    assert {node.metadata["metadata"]["split"] for node in nodes} == {"val"}


def test_missing_file_is_a_text_node(dual_encoders, few_scenes, tmp_path):
    photo = tmp_path / "photos" / "one.png"
    photo.parent.mkdir()
    photo.write_bytes(min((few_scenes / "images").iterdir()).read_bytes())
    visavis.index(dual_encoders / "clip", photo.parent, out=tmp_path / "index")
    retriever = VisavisIndexRetriever(tmp_path / "index")
    photo.unlink()
    (node,) = retriever.retrieve(QUERY)
    assert type(node.node) is TextNode
    assert node.text == "one.png"
    assert node.metadata["path"] is None


def test_retriever_answers_in_a_query_engine(scene_index):
    retriever = VisavisIndexRetriever(scene_index, similarity_top_k=2)
    engine = RetrieverQueryEngine.from_args(retriever, llm=MockLLM())
    response = engine.query(QUERY)
    assert [node.id_ for node in response.source_nodes] == [
        node.id_ for node in retriever.retrieve(QUERY)
    ]


def test_retriever_can_be_pickled_and_copied(scene_index):
    retriever = VisavisIndexRetriever(scene_index)
    expected = [node.id_ for node in retriever.retrieve("a red circle")]
    for copied in (pickle.loads(pickle.dumps(retriever)), copy.deepcopy(retriever)):
        assert [node.id_ for node in copied.retrieve("a red circle")] == expected


def test_folder_without_index_is_an_error(few_scenes):
    with pytest.raises(RunError, match="expected an index"):
        VisavisIndexRetriever(few_scenes)


def test_embeddings_are_the_vectors_of_the_model(embedding, dual_encoders, images):
    model, texts = visavis.load(dual_encoders / "clip"), [QUERY, "a blue square"]
    expected = model.encode_texts(texts).tolist()
    assert embedding.get_text_embedding_batch(texts) == expected
    assert embedding.get_query_embedding(QUERY) == pytest.approx(expected[0], abs=1e-6)
    expected = model.encode_images(images).tolist()
    assert embedding.get_image_embedding_batch(images) == expected
    content = io.BytesIO(Path(images[0]).read_bytes())
    assert embedding.get_image_embedding(content) == pytest.approx(expected[0], abs=1e-6)
    assert embedding.similarity(expected[0], expected[0]) == pytest.approx(1.0)


def test_embedding_is_the_same_in_both_ways(embedding, images):
    async def embed():
        return (
            await embedding.aget_query_embedding(QUERY),
            await embedding.aget_text_embedding(QUERY),
            await embedding.aget_text_embedding_batch([QUERY] * 12),
            await embedding.aget_image_embedding(images[0]),
            await embedding.aget_image_embedding_batch(images),
        )

    query, text, texts, image, all_images = asyncio.run(embed())
    assert query == text == embedding.get_text_embedding(QUERY)
    assert torch.allclose(torch.tensor(texts), torch.tensor([text] * 12), atol=1e-6)
    assert image == embedding.get_image_embedding(images[0])
    assert all_images == embedding.get_image_embedding_batch(images)


def test_embedding_is_serialized_by_the_name_of_its_model(embedding):
    restored = VisavisEmbedding.from_dict(embedding.to_dict())
    assert restored.to_dict() == embedding.to_dict()
    assert restored.get_text_embedding(QUERY) == embedding.get_text_embedding(QUERY)
    assert embedding.to_dict()["class_name"] == "VisavisEmbedding"
    assert MockEmbedding(embed_dim=2).to_dict().keys() <= embedding.to_dict().keys() | {"embed_dim"}


def test_vector_index_finds_a_text_by_itself(embedding):
    nodes = [TextNode(text=text) for text in (QUERY, "a blue square", "a green star")]
    index = VectorStoreIndex(nodes, embed_model=embedding)
    (found,) = index.as_retriever(similarity_top_k=1).retrieve("a blue square")
    assert found.text == "a blue square"
    assert found.score == pytest.approx(1.0, abs=1e-5)
