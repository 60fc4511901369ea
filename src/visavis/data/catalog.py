"""Every layout of data sets: a new one is a file that declares it, and its name in this tuple."""

from visavis.data.folder import CAPTION_LINES, CAPTION_TABLE
from visavis.data.karpathy import KARPATHY
from visavis.data.layout import Layout
from visavis.data.msrvtt import MSRVTT
from visavis.data.msvd import MSVD
from visavis.data.precomp import PRECOMP

CATALOG: tuple[Layout, ...] = (CAPTION_TABLE, CAPTION_LINES, MSRVTT, KARPATHY, MSVD, PRECOMP)
