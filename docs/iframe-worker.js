// The search of the site runs in a worker, which browsers refuse to a page that is opened from disk. There a hidden
// frame takes its place. It has this name because the search's script asks for it.
class IFrameWorker extends EventTarget {
  constructor(address) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inside = frame.contentWindow;
    addEventListener("message", (event) => {
      if (event.source !== this.inside) return;
      event.stopImmediatePropagation();
      const passed = new MessageEvent("message", { data: event.data });
      this.onmessage?.(passed);
      this.dispatchEvent(passed);
    });
    const page = this.inside.document;
    page.open();
    page.write(`<script>
      postMessage = (data) => parent.postMessage(data, "*");
      importScripts = (...addresses) => addresses.reduce((before, address) => before.then(() => new Promise((done) => {
        const script = document.createElement("script");
        script.src = address;
        script.onload = done;
        document.body.append(script);
      })), Promise.resolve());
    <\/script><script src="${address}"><\/script>`);
    page.close();
  }

  postMessage(data) { this.inside.dispatchEvent(new MessageEvent("message", { data })); }

  terminate() { this.inside.frameElement.remove(); }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
