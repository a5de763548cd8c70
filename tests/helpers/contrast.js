// Contrast of every text on the page against what is behind it, worst first: [ratio, text, ink, paper].
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (c) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1);
                       return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
                        .reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c[3]) return c; }
                          return [255, 255, 255, 255]; };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n = walk.nextNode(); n; n = walk.nextNode()) {
    const e = n.parentElement, style = getComputedStyle(e);
    if (!n.textContent.trim() || !e.checkVisibility() || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(e.tagName) || e.disabled) continue;
    const inSvg = e instanceof SVGElement;
    if (inSvg && e.tagName === "title") continue;
    const box = inSvg && e.parentElement.querySelector("rect");
    const back = box ? rgb(getComputedStyle(box).fill) : behind(e), ink = rgb(inSvg ? style.fill : style.color);
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), n.textContent.trim().slice(0, 30), ink.join(), back.join()]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}
