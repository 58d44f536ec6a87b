"""A unit's state before a round is planned: devices, uplink and estimates, in SI units."""

from collapipe.state.block_cost import BlockCost as BlockCost
from collapipe.state.cluster import ClusterState as ClusterState
from collapipe.state.cluster import Estimates as Estimates
from collapipe.state.cluster import unknown_cluster as unknown_cluster
from collapipe.state.device import DeviceProfile as DeviceProfile
from collapipe.state.device import check_links as check_links
from collapipe.state.device_laws import AffineLaw as AffineLaw
from collapipe.state.device_laws import EnergyBudget as EnergyBudget
from collapipe.state.device_laws import EnergyScope as EnergyScope
from collapipe.state.device_laws import Link as Link
from collapipe.state.device_laws import MemoryBudget as MemoryBudget
from collapipe.state.device_laws import Recomputing as Recomputing
from collapipe.state.device_laws import SharingLaw as SharingLaw
from collapipe.state.device_laws import received_gradients as received_gradients
from collapipe.state.device_laws import ring_s as ring_s
from collapipe.state.limits import MOST as MOST
from collapipe.state.limits import MOST_LAW as MOST_LAW
from collapipe.state.limits import ROUNDING as ROUNDING
from collapipe.state.limits import admitted as admitted
from collapipe.state.limits import check_kind as check_kind
from collapipe.state.precision import HopPrecision as HopPrecision
from collapipe.state.precision import Precision as Precision
from collapipe.state.uplink import Channel as Channel
from collapipe.state.uplink import HeadPlace as HeadPlace
from collapipe.state.uplink import Payload as Payload
from collapipe.state.uplink import Uplink as Uplink
