"""The report's style sheet; light, and dark where the reader's system is."""

COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#dc2626", "#a16207", "#64748b")

_SERIES = "".join(
    f".s{i}{{stroke:{c}}}.d{i}{{fill:{c}}}.b{i}{{fill:{c};opacity:.13}}.f{i}{{fill:{c};opacity:.75}}.k{i}{{background:{c}}}"
    for i, c in enumerate(COLOURS)
)

STYLE = (
    """
:root{--ink:#1a2230;--soft:#5b6675;--line:#dfe4ea;--page:#f6f7f9;--card:#fff;--good:#15803d;--bad:#b91c1c;--open:#475569}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa5b4;--line:#333c49;--page:#14181f;--card:#1c222b;
--good:#4ade80;--bad:#f87171;--open:#94a3b8}}
@media(prefers-color-scheme:dark){polyline,polygon,circle,i[class^=k]{filter:brightness(1.35)}}
summary{cursor:pointer;font-weight:600;margin:14px 0}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 24px 64px}
@media(max-width:560px){main{padding:16px 12px 48px}h2{margin-top:28px}}
h1{font-size:26px;margin:0;overflow-wrap:anywhere}h2{font-size:20px;margin:40px 0 12px;padding-bottom:6px;
border-bottom:1px solid var(--line)}h3{font-size:14px;margin:18px 0 6px}header p{margin:4px 0 18px;color:var(--soft)}
h1 em{font:600 13px/1 system-ui,sans-serif;padding:4px 10px;border-radius:99px;border:1px solid;vertical-align:middle;
color:var(--open)}h1 em.finished{color:var(--good)}h1 em.failed{color:var(--bad)}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(330px,100%),1fr));gap:14px}
.answers>div{background:var(--card);border:1px solid var(--line);border-top:4px solid var(--open);border-radius:8px;
padding:12px 16px}.answers>.good{border-top-color:var(--good)}.answers>.bad{border-top-color:var(--bad)}
.answers h3{margin:0 0 4px;font-size:16px}.answers p{margin:0}
code,pre{font:13px/1.45 ui-monospace,monospace;overflow-wrap:anywhere}
pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:8px 10px;margin:6px 0;
white-space:pre-wrap;max-height:260px;overflow:auto}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(370px,100%),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
figcaption{font-weight:600;margin-bottom:6px}figcaption small{display:block;
font-weight:400;color:var(--soft);min-height:1.5em}
svg{width:100%;height:auto;display:block}.grid{stroke:var(--line)}.tick{fill:var(--soft);font-size:12px}
polyline{fill:none;stroke-width:2;stroke-linejoin:round}.hit{fill:transparent}
.legend{font-size:13px;color:var(--soft);display:flex;flex-wrap:wrap;gap:4px 14px;margin-top:4px}
i[class^=k]{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:5px}
.wide{overflow-x:auto;margin:10px 0}table{border-collapse:collapse;font-size:14px;background:var(--card);min-width:40%}
th,td{border:1px solid var(--line);padding:4px 12px;text-align:left;vertical-align:top;max-width:540px;
overflow-wrap:break-word}
th{color:var(--soft);font-weight:600;white-space:nowrap}b.good{color:var(--good)}b.bad{color:var(--bad)}.none,.soft,
td small{color:var(--soft)}.gone{fill:var(--bad)}.dash{stroke-dasharray:7 4}i.dash{border-radius:0;height:4px}
.answers p+p{margin-top:6px}
.samples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:12px}
article{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 12px}article p{margin:0}
article small{color:var(--soft)}.prompt{opacity:.75}
"""
    + _SERIES
)
