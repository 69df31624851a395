"""Global settings: tag ranges and modes of the cluster."""

from __future__ import annotations

from weft.domain import kinds, model
from weft.domain.errors import Conflict
from weft.domain.store_types import Write
from weft.domain.transaction import ReadSet, put
from weft.domain.validation import MAX_VLAN, MAX_VNI, MAX_VNI_SPAN, parse_tag_range


def put_global(reading: ReadSet, wanted: model.Global, present: model.Global | None) -> list[Write]:
    """Ranges must cover the tags in use (O7, O8); mode and private subnet change only without networks (O9, O10)."""
    _check_range(reading, "vlan", wanted.vlans, field="vlans", highest=MAX_VLAN, widest=MAX_VLAN)
    _check_range(reading, "vni", wanted.vxlans, field="vxlans", highest=MAX_VNI, widest=MAX_VNI_SPAN)
    # Datapaths of existing networks cannot be converted between bridging and routing.
    if present is not None and wanted.fwd_mode != present.fwd_mode:
        _refuse_with_networks(reading, "fwdMode")
        if present.fwd_mode == "routing" and any(True for _ in reading.all(kinds.BGP)):
            raise Conflict("fwdMode cannot leave routing while Bgp peers exist: delete them first", field="fwdMode")
    if present is not None and wanted.pvt_subnet != present.pvt_subnet:
        _refuse_with_networks(reading, "pvtSubnet")
    return [] if wanted == present else [put(kinds.GLOBAL, wanted)]


def _check_range(reading: ReadSet, pool: str, text: str, *, field: str, highest: int, widest: int) -> None:
    first, last = parse_tag_range(text, field=field, highest=highest, widest=widest)
    # A network created at the same moment may take a tag that the new range excludes.
    reading.compare_prefix(kinds.number_claims(pool))
    outside = [number for number in reading.cluster.number_pool(pool).holders if not first <= number <= last]
    if outside:
        number = min(outside)
        holder = reading.cluster.number_pool(pool).holders[number].value.holder
        raise Conflict(f"{field} {text} excludes tag {number}, which {holder} uses", field=field)


def _refuse_with_networks(reading: ReadSet, field: str) -> None:
    networks = [kinds.NETWORK.key_text(network) for network in reading.all(kinds.NETWORK)]
    if networks:
        raise Conflict(
            f"{field} cannot change while networks exist ({', '.join(networks[:5])}): delete them first",
            field=field,
            details={"networks": networks[:100]},
        )


def delete_global(reading: ReadSet, present: model.Global) -> list[Write]:
    """Reset the settings to their defaults, under the same conditions as any change. The mode stays."""
    return put_global(reading, model.Global(fwd_mode=present.fwd_mode), present)
