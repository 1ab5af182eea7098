"""Import CSV: one host per row. Columns have the names of inventory fields; other columns become labels if possible."""

from __future__ import annotations

import csv
import io

from gpurun.errors import BadInput
from gpurun.inventory import fields
from gpurun.inventory.imports.draft import Draft
from gpurun.quantities.counts import count

_NAMES = ("name", "host", "hostname", "node", "nodename")
_SAME = {
    "ip": "address",
    "ip_address": "address",
    "ssh_port": "port",
    "ssh_user": "user",
    "gpu_count": "gpus",
    "num_gpus": "gpus",
    "gpu": "gpu_type",
    "gpu_type": "gpu_type",
    "switch": "rack",
}


def read(text: str, draft: Draft, file: str) -> None:
    """Fill a draft. Raises BadInput if no column contains host names."""
    header = text.partition("\n")[0]
    delimiter = max(",;\t|", key=header.count)
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff")), delimiter=delimiter)
    try:
        columns = [column.strip().lower().replace(" ", "_") for column in next(rows, [])]
        at = next((columns.index(name) for name in _NAMES if name in columns), None)
        if at is None:
            raise BadInput(f"the CSV table has no column named {' or '.join(_NAMES)}", where=f"{file}:1")
        for row in rows:
            if any(row):
                _row(dict(zip(columns, row, strict=False)), columns[at], draft, f"{file}:{rows.line_num}")
    except csv.Error as error:
        raise BadInput(f"the file is not CSV: {error}", where=f"{file}:{rows.line_num}") from error
    draft.leave_out_without_gpus(file)
    taken = ", ".join(column for column in columns if column)
    draft.took.append(f"{count(len(draft.values), 'host')}; columns {taken}")


def _row(row: dict[str, str], name_column: str, draft: Draft, where: str) -> None:
    host = row[name_column].strip()
    if not draft.host(host, where):
        return
    for column, cell in row.items():
        value, key = cell.strip(), _SAME.get(column, column)
        if not value or column == name_column:
            continue
        if key == "gpu_type":
            draft.gpu_type(host, value, where)
        elif key == "rack" or (key in fields.HOST and key != "labels"):
            draft.put(host, key, value, where)
        else:
            draft.label(host, key.removeprefix("labels.").removeprefix("label."), value, where)
