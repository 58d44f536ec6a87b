"""The configuration's sections as frozen, validated objects; fields have the options' names."""

from collapipe.sections.compression import CompressionSettings as CompressionSettings
from collapipe.sections.compression import PrecisionOrAuto as PrecisionOrAuto
from collapipe.sections.data import DataSettings as DataSettings
from collapipe.sections.data import EvaluationSettings as EvaluationSettings
from collapipe.sections.federation import FederationSettings as FederationSettings
from collapipe.sections.federation import ServerOptimizerSettings as ServerOptimizerSettings
from collapipe.sections.numbers import Count as Count
from collapipe.sections.numbers import CountFrom0 as CountFrom0
from collapipe.sections.numbers import NotNegative as NotNegative
from collapipe.sections.numbers import Positive as Positive
from collapipe.sections.numbers import Share as Share
from collapipe.sections.privacy import PrivacySettings as PrivacySettings
from collapipe.sections.runtime import LinkSettings as LinkSettings
from collapipe.sections.runtime import RuntimeSettings as RuntimeSettings
from collapipe.sections.runtime import ServerSettings as ServerSettings
from collapipe.sections.runtime import TrackingSettings as TrackingSettings
from collapipe.sections.runtime import address as address
from collapipe.sections.training import AdapterSettings as AdapterSettings
from collapipe.sections.training import DecoderSettings as DecoderSettings
from collapipe.sections.training import FrameworkSettings as FrameworkSettings
from collapipe.sections.training import LoraSettings as LoraSettings
from collapipe.sections.training import OptimizerSettings as OptimizerSettings
from collapipe.sections.training import PipelineSettings as PipelineSettings
