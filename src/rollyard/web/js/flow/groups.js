// A table of groups with the reason of their state.
import { html } from "../dom.js";
import { Link, paths } from "../router.js";
import { Badge, Table, Time } from "../ui.js";
import { Line } from "./figures.js";
import { count, percent, reward, short, table } from "../format.js";

export const GROUP_STATES = ["open", "complete", "delivered", "filtered", "failed", "cancelled", "dropped", "void"];

const REASONS = table({
  hopeless: "ended early: whatever its missing members scored, the filter would not keep it",
  short_of_members: "too few members ended without an infrastructure failure",
  rewound: "undone by a rewind of the trainer",
  stale: "older than the draw allows",
  closed: "the draw was closed",
});

/** Why a group has its state, from its reason, its statistics and the filter of its draw (`keep`). */
export function why(group, keep) {
  if (group.reason) return REASONS[group.reason] || group.reason;
  const stats = group.stats;
  if (group.state !== "filtered" || !stats) return "";
  if (stats.lowest === null || stats.lowest === undefined) return "no member counts for training";
  if (stats.lowest === stats.highest) return `every member got ${reward(stats.lowest)}: no spread to learn from`;
  if (keep?.kind === "spread") return `its spread ${reward(stats.spread)} is not above ${reward(keep.above)}`;
  if (keep?.kind === "pass_rate") return `its pass rate ${percent(stats.pass_rate)} is outside ${percent(keep.low)} to ${percent(keep.high)}`;
  if (keep?.kind === "filter") return `the filter ${keep.name} did not keep it`;
  return "the filter did not keep it";
}

export function GroupTable({ groups, keep, empty }) {
  const columns = [
    { name: "id", label: "Group", cell: (group) => html`<${Link} path=${paths.group(group.run, group.id)}><${Line} text=${group.id} /><//>` },
    { name: "state", label: "State", cell: (group) => html`<${Badge} value=${group.state} />` },
    { name: "why", label: "Why", cell: (group) => html`<span class="why"><${Line} text=${why(group, keep)} /></span>` },
    { name: "mean", label: "Mean reward", numeric: true, cell: (group) => reward(group.stats?.mean) },
    { name: "range", label: "Lowest, highest", numeric: true, cell: (group) => (group.stats?.lowest === null || group.stats?.lowest === undefined ? "–" : `${reward(group.stats.lowest)}, ${reward(group.stats.highest)}`) },
    { name: "members", label: "Members", numeric: true, cell: (group) => (group.stats ? `${count(group.stats.members)} of ${count(group.size)}` : count(group.size)) },
    { name: "versions", label: "Versions", numeric: true, cell: (group) => (group.oldest_version < 0 ? "–" : group.oldest_version === group.newest_version ? group.oldest_version : `${group.oldest_version} to ${group.newest_version}`) },
    { name: "batch", label: "Batch", numeric: true, cell: (group) => group.batch ?? "–" },
    { name: "tokens", label: "Tokens", numeric: true, cell: (group) => short(group.stats?.sampled_tokens) },
    { name: "at", label: "Changed", numeric: true, cell: (group) => html`<${Time} at=${group.updated_at} />` },
  ];
  return html`<${Table} label="Groups" columns=${columns} rows=${groups} rowKey=${(group) => `${group.run}/${group.id}`} empty=${empty} />`;
}
