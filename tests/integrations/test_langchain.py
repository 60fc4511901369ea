"""VisavisRetriever and VisavisEmbeddings in the standard tests of LangChain (langchain-tests), and
compared with ``visavis.search``.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import visavis
from visavis.core.errors import MissingExtra, RunError
from visavis.retrieval.items import ItemFilter

pytest.importorskip("langchain_core", reason="LangChain is installed by make slow")
pytest.importorskip("langchain_tests", reason="install langchain-tests")
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import (
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
)
from langchain_tests.unit_tests import EmbeddingsUnitTests

from visavis.integrations.langchain import VisavisEmbeddings, VisavisRetriever

pytestmark = pytest.mark.slow
QUERY = "a red circle"


@pytest.fixture(scope="module")
def anyio_backend():
    """Asynchronous tests run with asyncio."""
    return "asyncio"


@pytest.mark.anyio
class TestVisavisRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _index(self, scene_index):
        self.folder = scene_index

    @property
    def retriever_constructor(self):
        return VisavisRetriever

    @property
    def retriever_constructor_params(self):
        return {"index": self.folder}

    @property
    def retriever_query_example(self):
        return QUERY


class ModelParams:
    @pytest.fixture(autouse=True)
    def _model(self, dual_encoders):
        self.folder = dual_encoders / "clip"

    @property
    def embeddings_class(self):
        return VisavisEmbeddings

    @property
    def embedding_model_params(self):
        return {"model": self.folder}


class TestVisavisEmbeddingsUnit(ModelParams, EmbeddingsUnitTests):
    pass


@pytest.mark.anyio
class TestVisavisEmbeddings(ModelParams, EmbeddingsIntegrationTests):
    pass


def test_documents_are_the_results_of_a_search(scene_index, few_scenes):
    documents = VisavisRetriever(scene_index, k=4).invoke(QUERY)
    hits = visavis.search(scene_index, QUERY, top=4).to_json()["hits"]
    assert [document.metadata for document in documents] == hits
    assert [document.id for document in documents] == [hit["key"] for hit in hits]
    assert [document.page_content for document in documents] == [
        hit["metadata"]["caption"] for hit in hits
    ]
    assert all(str(few_scenes) in document.metadata["path"] for document in documents)


def test_documents_without_captions_have_the_file_name(dual_encoders, few_scenes, tmp_path):
    visavis.index(dual_encoders / "clip", few_scenes / "images", out=tmp_path / "index")
    (document,) = VisavisRetriever(tmp_path / "index", k=1).invoke(QUERY)
    assert document.page_content == document.metadata["name"]


def test_filter_of_the_retriever_or_of_a_call(scene_index):
    def splits(documents):
        return {document.metadata["metadata"]["split"] for document in documents}

    val, test = (ItemFilter(metadata={"split": split}) for split in ("val", "test"))
    retriever = VisavisRetriever(scene_index, item_filter=val)
    assert splits(retriever.invoke(QUERY)) == {"val"}
    assert splits(retriever.invoke(QUERY, item_filter=test)) == {"test"}
    assert "train" in splits(retriever.invoke(QUERY, item_filter=ItemFilter(), k=20))


@pytest.mark.anyio
async def test_asynchronous_call_takes_the_same_options(scene_index):
    retriever, split = VisavisRetriever(scene_index), ItemFilter(metadata={"split": "val"})
    documents = await retriever.ainvoke(QUERY, k=2, item_filter=split)
    assert documents == retriever.invoke(QUERY, k=2, item_filter=split)
    assert len(documents) == 2


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("langchain", "langchain_core.retrievers", "langchain"),
        ("llama_index", "llama_index.core.base.base_retriever", "llama-index"),
    ],
)
def test_missing_library_names_its_extra(name, module, extra, monkeypatch):
    monkeypatch.delitem(sys.modules, f"visavis.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"visavis\[{extra}\]"):
        importlib.import_module(f"visavis.integrations.{name}")


def test_retriever_runs_in_a_chain_of_threads(scene_index):
    retriever = VisavisRetriever(scene_index, k=2)
    chain = retriever | RunnableLambda(lambda documents: [document.id for document in documents])
    queries = ["a red circle", "a blue square", "a green star"] * 4
    with ThreadPoolExecutor(4) as pool:
        alone = list(pool.map(lambda query: chain.invoke(query), queries))
    assert chain.batch(queries) == alone
    assert alone[:3] == alone[3:6]


def test_retriever_can_be_pickled_and_copied(scene_index):
    retriever = VisavisRetriever(scene_index, k=3, item_filter=ItemFilter(kind="image"))
    expected = retriever.invoke(QUERY)
    for copied in (
        pickle.loads(pickle.dumps(retriever)),
        copy.deepcopy(retriever),
        copy.copy(retriever),
        retriever.model_copy(deep=True),
    ):
        found = copied.invoke(QUERY)
        assert [document.id for document in found] == [document.id for document in expected]


def test_embeddings_can_be_pickled_and_copied(dual_encoders):
    embeddings = VisavisEmbeddings(dual_encoders / "clip")
    expected = embeddings.embed_query(QUERY)
    for copied in (pickle.loads(pickle.dumps(embeddings)), copy.deepcopy(embeddings)):
        assert copied.embed_query(QUERY) == pytest.approx(expected, abs=1e-6)


def test_folder_without_index_is_an_error(few_scenes):
    with pytest.raises(RunError, match="expected an index"):
        VisavisRetriever(few_scenes)


def test_embeddings_are_the_vectors_of_the_model(dual_encoders, few_scenes):
    model = visavis.load(dual_encoders / "clip")
    embeddings, paths = VisavisEmbeddings(model), sorted((few_scenes / "images").iterdir())[:3]
    texts = ["a red circle", "a blue square"]
    assert torch.equal(
        torch.tensor(embeddings.embed_documents(texts)), model.encode_texts(texts).cpu()
    )
    images = torch.tensor(embeddings.embed_image([str(path) for path in paths]))
    assert torch.equal(images, model.encode_images(paths).cpu())
    assert embeddings.embed_documents([]) == embeddings.embed_image([]) == []


def test_vector_store_finds_a_text_by_itself(dual_encoders):
    texts = ["a red circle", "a blue square", "a green star"]
    store = InMemoryVectorStore.from_texts(texts, VisavisEmbeddings(dual_encoders / "clip"))
    for text in texts:
        ((document, score),) = store.similarity_search_with_score(text, k=1)
        assert document.page_content == text
        assert score == pytest.approx(1.0, abs=1e-5)
