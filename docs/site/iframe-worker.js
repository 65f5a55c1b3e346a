// A page that was opened from a folder may not start a worker. The search's worker then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      const inside = (this.inside = frame.contentWindow);
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      const load = (name) =>
        new Promise((done) => {
          const script = inside.document.createElement("script");
          script.src = new URL(name, new URL(url, location));
          script.onload = done;
          inside.document.body.append(script);
        });
      inside.importScripts = (...names) => names.reduce((before, name) => before.then(() => load(name)), Promise.resolve());
      this.ready = load("");
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
